# The release image: built, rebuilt elsewhere, attested, and taken through a registry as a user would.
# The folder of an image holds the digest of all that decides it: another source, lock or recipe is another image, and a
# commit that changes none of them is not.


include: "container_common.smk"


wildcard_constraints:
    variant=any_of(IMAGE_VARIANTS),
    key="[0-9a-f]{12}|none",


rule container_image:
    input:
        ancient(environment_record("engine")),
        # The key in the folder's name stands for their content.
        debian=ancient("containers/locks/debian-{variant}.json"),
        python=ancient("containers/locks/python-{variant}.txt"),
        backend=ancient("containers/locks/build.txt"),
        recipe=ancient("containers/image.toml"),
    output:
        "results/images/{variant}-{key}/image.json",
    log:
        "results/logs/images/{variant}-{key}-image.log",
    benchmark:
        "results/benchmarks/images/{variant}-{key}-image.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, output: built(output[0]),
        commit=IMAGE_COMMIT,
        run=CONTAINERS,
    shell:
        "rm -rf {params.folder};"
        " {params.run} build --variant {wildcards.variant} --revision {params.commit}"
        " --output {params.folder} > {log} 2>&1"
        " && cp {params.folder}/image.json {output}"


# A second build from a fresh clone in another folder must give the same digest; a path that differs is named.
rule container_rebuild:
    input:
        "results/images/{variant}-{key}/image.json",
    output:
        "results/images/{variant}-{key}/rebuilt.json",
    log:
        "results/logs/images/{variant}-{key}-rebuild.log",
    benchmark:
        "results/benchmarks/images/{variant}-{key}-rebuild.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, input: built(input[0]),
        run=CONTAINERS,
    shell:
        "{params.run} rebuild-check {params.folder} --scratch results/images/elsewhere --record {output} 2>&1"
        " | tee {log}"


rule container_attested:
    input:
        "results/images/{variant}-{key}/image.json",
    output:
        "results/images/{variant}-{key}/attested.json",
    log:
        "results/logs/images/{variant}-{key}-attest.log",
    benchmark:
        "results/benchmarks/images/{variant}-{key}-attest.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, input: built(input[0]),
        run=CONTAINERS,
        trust=TRUST,
    shell:
        "{params.run} attest {params.folder} --trust {params.trust} > {log} 2>&1 && cp {input} {output}"


# A report is signed once, about the image that it measured or the source tree, and verified at once. The signed
# evaluation of an image is attached to the image too.
rule report_signed:
    input:
        report="reports/{run}/report.json",
        image=lambda w: image_of(w, "attested"),
    output:
        "results/{run}/signed.json",
    log:
        "results/{run}/logs/signed.log",
    benchmark:
        "results/{run}/benchmarks/signed.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        folder=lambda w, input: str(Path(input.report).parent),
        raw=lambda w, output: str(Path(output[0]).parent),
        image=lambda w, input: f"--image {built(input.image)}" if input.image else "",
        run=CONTAINERS,
        verify=VERIFY,
        trust=TRUST,
    shell:
        "{{ {params.run} sign-report {params.folder} --raw {params.raw} --trust {params.trust} {params.image}"
        " && {params.verify} {params.folder} --raw {params.raw} --json {output}; }} 2>&1 | tee {log}"


# Push to a loopback registry, verify, pull, run, and ask a question: an image on its own.
rule container_shipped:
    input:
        "results/images/{variant}-{key}/attested.json",
        model=ancient(question_model),
    output:
        "results/images/{variant}-{key}/shipped.json",
    log:
        "results/logs/images/{variant}-{key}-ship.log",
    benchmark:
        "results/benchmarks/images/{variant}-{key}-ship.tsv"
    conda:
        "../envs/engine.yaml"
    resources:
        gpu=1,
    params:
        folder=lambda w, input: built(input[0]),
        work=lambda w, output: str(Path(output[0]).parent / "registry"),
        model=lambda w, input: str(input.model).removesuffix(".json"),
        device=PLAN_OF["release"].device,
        run=CONTAINERS,
    shell:
        "{params.run} ship {params.folder} --model {params.model} --work {params.work} --record {output}"
        " --device {params.device} 2>&1 | tee {log}"


# The same with the evaluation of a run attached, once the checks are passed: the end of a release.
rule release_shipped:
    input:
        image=lambda w: image_of(w, "attested"),
        signed="results/{run}/signed.json",
        verdict="results/{run}/verdict.json",
        model=ancient(question_model),
    output:
        "results/{run}/shipped.json",
    log:
        "results/{run}/logs/shipped.log",
    benchmark:
        "results/{run}/benchmarks/shipped.tsv"
    conda:
        "../envs/engine.yaml"
    resources:
        gpu=1,
    params:
        folder=lambda w, input: built(input.image),
        work=lambda w, input: str(Path(input.image).parent / "registry"),
        model=lambda w, input: str(input.model).removesuffix(".json"),
        device=PLAN_OF["release"].device,
        run=CONTAINERS,
    shell:
        "{params.run} ship {params.folder} --model {params.model} --work {params.work} --run {wildcards.run}"
        " --record {output} --device {params.device} 2>&1 | tee {log}"


# The commands that a reader types: on the image with its attestations as it lies here, and on the report.
rule release_verified:
    input:
        image=lambda w: image_of(w, "attested"),
        shipped="results/{run}/shipped.json",
    output:
        image="results/{run}/verified-image.json",
        report="results/{run}/verified.json",
    log:
        "results/{run}/logs/verified.log",
    benchmark:
        "results/{run}/benchmarks/verified.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        layout=lambda w, input: f"{built(input.image)}/layout",
        verify=VERIFY,
    shell:
        "{{ {params.verify} {params.layout} --json {output.image}"
        " && {params.verify} reports/{wildcards.run} --raw results/{wildcards.run} --json {output.report}; }} 2>&1"
        " | tee {log}"


# What docs/container.md points to. Not part of a release: it downloads and builds everything once more.
rule container_figures:
    input:
        ancient(environment_record("engine")),
        model=ancient(question_model),
    output:
        page="reports/container/README.md",
        figures="reports/container/figures.json",
    log:
        "results/logs/images/figures.log",
    benchmark:
        "results/benchmarks/images/figures.tsv"
    conda:
        "../envs/engine.yaml"
    resources:
        gpu=1,
    params:
        folder=lambda w, output: str(Path(output.page).parent),
        model=lambda w, input: str(input.model).removesuffix(".json"),
        shown="snakemake container_figures --force",
        run=CONTAINERS,
    shell:
        "{params.run} figures --model {params.model} --scratch results/images --output {params.folder}"
        " --shown {params.shown:q} 2>&1 | tee {log}"


localrules:
    image,
    container,
    signed_report,
    rebuild_check,


# Only the image of this checkout.
rule image:
    input:
        image_file("image"),


# The image of this checkout, attested, pushed, verified, pulled and run.
rule container:
    input:
        image_file("shipped"),


# The report of the whole evaluation, signed and verified.
rule signed_report:
    input:
        f"results/{PLAN_OF['release'].run}/signed.json",


# A second build elsewhere must give the same digest.
rule rebuild_check:
    input:
        image_file("rebuilt"),
