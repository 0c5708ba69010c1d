# The release image: built from HEAD, rebuilt elsewhere, attested, and taken through a registry as a user would.
# The name of every file here holds the commit: another commit is another image.


include: "container_common.smk"


wildcard_constraints:
    variant=any_of(IMAGE_VARIANTS),
    commit="[0-9a-f]{12}|none",


rule container_image:
    input:
        ancient(environment_record("engine")),
        debian="containers/locks/debian-{variant}.json",
        python="containers/locks/python-{variant}.txt",
        recipe="containers/image.toml",
    output:
        "results/images/{variant}-{commit}/image.json",
    log:
        "results/logs/images/{variant}-{commit}-image.log",
    benchmark:
        "results/benchmarks/images/{variant}-{commit}-image.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, output: str(Path(output[0]).parent / "built"),
        run=CONTAINERS,
    shell:
        "rm -rf {params.folder};"
        " {params.run} build --variant {wildcards.variant} --revision {wildcards.commit}"
        " --output {params.folder} > {log} 2>&1"
        " && cp {params.folder}/image.json {output}"


# A second build from a fresh clone in another folder must give the same digest; a path that differs is named.
rule container_rebuild:
    input:
        "results/images/{variant}-{commit}/image.json",
    output:
        "results/images/{variant}-{commit}/rebuilt.json",
    log:
        "results/logs/images/{variant}-{commit}-rebuild.log",
    benchmark:
        "results/benchmarks/images/{variant}-{commit}-rebuild.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, input: str(Path(input[0]).parent / "built"),
        run=CONTAINERS,
    shell:
        "{params.run} rebuild-check {params.folder} --scratch results/images/elsewhere 2>&1 | tee {log}"
        " && cp {input} {output}"


rule container_attested:
    input:
        "results/images/{variant}-{commit}/image.json",
    output:
        "results/images/{variant}-{commit}/attested.json",
    log:
        "results/logs/images/{variant}-{commit}-attest.log",
    benchmark:
        "results/benchmarks/images/{variant}-{commit}-attest.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, input: str(Path(input[0]).parent / "built"),
        run=CONTAINERS,
        trust=config.get("trust", "private"),
    shell:
        "{params.run} attest {params.folder} --trust {params.trust} > {log} 2>&1 && cp {input} {output}"


# A report is signed once, about the image it measured or the source tree, and verified at once.
rule report_signed:
    input:
        "reports/{run}/report.json",
    output:
        "results/{run}/signed.json",
    log:
        "results/{run}/logs/signed.log",
    benchmark:
        "results/{run}/benchmarks/signed.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, input: str(Path(input[0]).parent),
        raw=lambda w, output: str(Path(output[0]).parent),
        run=CONTAINERS,
        trust=config.get("trust", "private"),
    shell:
        "{{ {params.run} sign-report {params.folder} --raw {params.raw} --trust {params.trust};"
        " PYTHONPATH=.:containers:eval .venv/bin/python -m sparkinfer_containers.verify.cli {params.folder}"
        " --json {output}; }} 2>&1 | tee {log}"


# Push to a loopback registry, verify, pull, run, and ask a question.
rule container_shipped:
    input:
        "results/images/{variant}-{commit}/attested.json",
        model=ancient(toy_model),
    output:
        "results/images/{variant}-{commit}/shipped.json",
    log:
        "results/logs/images/{variant}-{commit}-ship.log",
    benchmark:
        "results/benchmarks/images/{variant}-{commit}-ship.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, input: str(Path(input[0]).parent / "built"),
        work=lambda w, output: str(Path(output[0]).parent / "registry"),
        model=lambda w, input: str(input.model).removesuffix(".json"),
        run=CONTAINERS,
    shell:
        "{params.run} ship {params.folder} --model {params.model} --work {params.work} --record {output}"
        " 2>&1 | tee {log}"


localrules:
    container,
    signed_report,
    rebuild_check,


# The image of this commit, attested, pushed, verified, pulled and run.
rule container:
    input:
        image_file("shipped"),


# The report of the whole evaluation, signed and verified.
rule signed_report:
    input:
        f"results/{PLAN_OF['release'].run}/signed.json",


rule rebuild_check:
    input:
        image_file("rebuilt"),
