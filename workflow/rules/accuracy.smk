# The accuracy gate: what both engines say about the same held-out text. Each server scores it while it is up for its
# first cells, so that none is started for it; the comparison then needs no device and counts as a check. Where the last
# release is one of the run's engines, it is a second reference.
GATES = {ACCURACY: "vllm", ACCURACY_PREVIOUS: PREVIOUS}


rule scores:
    input:
        server=lambda w: ancient(server_inputs(w)),
        # They need the device without a server on it, so they come first, as they do for the cells.
        checks=lambda w: ancient(plan_of(w).device_checks()),
    output:
        "results/{run}/accuracy/{engine}-{model}.xz",
    log:
        "results/{run}/logs/accuracy/{engine}-{model}.log",
    benchmark:
        "results/{run}/benchmarks/accuracy/{engine}-{model}.tsv"
    priority: lambda w: cell_priority(scoring(w))
    conda:
        "../envs/engine.yaml"
    threads: workflow.cores
    resources:
        gpu=1,
    params:
        server=lambda w: server_options(scoring(w)),
        model=lambda w: model_folder(plan_of(w).models[w.model]),
        options=lambda w: accuracy_options(w, ("context", "answer_tokens", "limit")),
    shell:
        "exec .venv/bin/python workflow/scripts/lease.py run {params.server:q} --"
        " .venv/bin/python eval/accuracy.py {{url}} --model-a {{served_name}} --tokenizer {params.model}"
        " --method prompt {params.options:q} --record {output} > {log} 2>&1"


rule accuracy:
    input:
        engine="results/{run}/accuracy/sparkinfer-{model}.xz",
        reference=lambda w: f"results/{w.run}/accuracy/{GATES[w.gate]}-{w.model}.xz",
    output:
        "results/{run}/checks/{gate}-{model}.json",
    log:
        "results/{run}/logs/checks/{gate}-{model}.log",
    benchmark:
        "results/{run}/benchmarks/checks/{gate}-{model}.tsv"
    wildcard_constraints:
        gate=any_of(GATES),
    conda:
        "../envs/engine.yaml"
    params:
        model=lambda w: model_folder(plan_of(w).models[w.model]),
        options=lambda w: accuracy_options(
            w, ("top1", "top1_plain", "kl", "loss", "gap", "beyond", "parted")
        ),
    shell:
        # 1 is a difference: kept, shown in the report and judged at the end, as that of any check.
        ".venv/bin/python eval/accuracy.py scores:{input.engine} scores:{input.reference} --model {params.model}"
        " {params.options:q} --json {output} > {log} 2>&1 || [ $? -eq 1 ]"
