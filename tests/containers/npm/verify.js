// Usage: node verify.js BUNDLE TRUSTED_ROOT IDENTITY ISSUER. Exit 0 and the payload on stdout, or 1 and the reason.
'use strict';
const fs = require('fs');
const { bundleFromJSON } = require('@sigstore/bundle');
const { TrustedRoot } = require('@sigstore/protobuf-specs');
const { toSignedEntity, toTrustMaterial, Verifier } = require('@sigstore/verify');

const [bundlePath, rootPath, identity, issuer] = process.argv.slice(2);
const read = (path) => JSON.parse(fs.readFileSync(path, 'utf8'));

try {
  const bundle = bundleFromJSON(read(bundlePath));
  const trust = toTrustMaterial(TrustedRoot.fromJSON(read(rootPath)));
  const verifier = new Verifier(trust, { tlogThreshold: 1, ctlogThreshold: 1, timestampThreshold: 1 });
  const exactly = identity.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
  verifier.verify(toSignedEntity(bundle), {
    subjectAlternativeName: `^${exactly}$`,
    extensions: { issuer },
  });
  process.stdout.write(bundle.content.dsseEnvelope.payload);
} catch (error) {
  process.stderr.write(`${error.code || error.name}: ${error.message}\n`);
  process.exit(1);
}
