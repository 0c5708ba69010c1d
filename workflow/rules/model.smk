# The models and, for each, the prompts of every cell.


rule model:
    input:
        ancient(environment_record("engine")),
    output:
        manifest="results/models/{model}-{digest}.json",
    log:
        "results/logs/models/{model}-{digest}.log",
    benchmark:
        "results/benchmarks/models/{model}-{digest}.tsv"
    wildcard_constraints:
        digest="[0-9a-f]{8}",
    priority: 900
    conda:
        "../envs/engine.yaml"
    params:
        source=lambda w: json.dumps(MODELS[w.model, w.digest].source),
        definition=lambda w: json.dumps(
            MODELS[w.model, w.digest].definition, sort_keys=True
        ),
        folder=lambda w, output: output.manifest.removesuffix(".json"),
    shell:
        ".venv/bin/python workflow/scripts/get_model.py --source {params.source:q} --definition {params.definition:q}"
        " --folder {params.folder} --manifest {output.manifest} > {log} 2>&1"


rule prompts:
    input:
        model=ancient(model_manifest),
    output:
        prompts="results/{run}/prompts/{model}/b{block}/{cell}.jsonl",
        meta="results/{run}/prompts/{model}/b{block}/{cell}.meta.json",
    log:
        "results/{run}/logs/prompts/{model}-b{block}-{cell}.log",
    benchmark:
        "results/{run}/benchmarks/prompts/{model}-b{block}-{cell}.tsv"
    priority: 800
    conda:
        "../envs/engine.yaml"
    params:
        cells=lambda w: plan_of(w).settings.get("cells_file", "config/cells.yaml"),
        scale=lambda w: plan_of(w).settings["scale"],
        overrides=lambda w: json.dumps(plan_of(w).settings.get("scale_overrides", {})),
        seed=lambda w: plan_of(w).settings.get("prompt_seed", 1),
        model=lambda w, input: input.model.removesuffix(".json"),
        folder=lambda w, output: str(Path(output.prompts).parent),
    shell:
        ".venv/bin/python eval/make_prompts.py --cells {params.cells} --scale {params.scale} --overrides {params.overrides:q}"
        " --model {params.model} --block {wildcards.block} --seed {params.seed} --cell {wildcards.cell}"
        " --out {params.folder} > {log} 2>&1"
