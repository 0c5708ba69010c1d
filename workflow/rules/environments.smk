# Virtual environments from hashed locks, and the source that an engine's server runs from.
# The name of a record holds the digest of the locks: no rule above a measurement has an input that could become newer.


rule environment:
    output:
        record="results/environments/{device}/{name}-{digest}.json",
    log:
        "results/logs/environments/{device}-{name}-{digest}.log",
    benchmark:
        "results/benchmarks/environments/{device}-{name}-{digest}.tsv"
    wildcard_constraints:
        name=any_of(ENVIRONMENTS),
        device=any_of({plan.device for plan in PLANS.values()}),
        digest="[0-9a-f]{8}",
    priority: 1000
    conda:
        "../envs/snakemake.yaml"
    shell:
        "python3 workflow/scripts/make_env.py {wildcards.name} --device {wildcards.device} --record {output.record}"
        " 2>&1 | tee {log}"


# The image is unpacked, the working tree or a release tag copied.
rule engine_source:
    input:
        lambda w: ancient(engine_source_inputs(w)),
    output:
        record="results/engines/{engine}-{digest}.json",
    log:
        "results/logs/engines/{engine}-{digest}.log",
    benchmark:
        "results/benchmarks/engines/{engine}-{digest}.tsv"
    wildcard_constraints:
        digest="[0-9a-f]{12}",
    priority: 900
    conda:
        "../envs/engine.yaml"
    params:
        digest=lambda w: ENGINES[w.engine, w.digest].digest,
        origin=engine_origin,
        folder=lambda w, output: output.record.removesuffix(".json"),
    shell:
        ".venv/bin/python workflow/scripts/engine_source.py {params.folder} --digest {params.digest} {params.origin}"
        " > {log} 2>&1"
        ' && echo \'{{"digest": "{params.digest}"}}\' > {output.record}'
