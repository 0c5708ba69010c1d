# Correctness programs. They need the device, so they run before the first server and with none held.
# 0: equal, 1: a difference (kept, shown in the report, and judged at the end), 4: does not apply to this model.


rule check:
    input:
        model=ancient(model_manifest),
    output:
        "results/{run}/checks/{check}-{model}.json",
    log:
        "results/{run}/logs/checks/{check}-{model}.log",
    benchmark:
        "results/{run}/benchmarks/checks/{check}-{model}.tsv"
    wildcard_constraints:
        check=any_of(
            {
                c
                for plan in PLANS.values()
                for c in plan.settings["checks"]
                if c != ACCURACY
            }
        ),
    priority: 500
    conda:
        "../envs/engine.yaml"
    threads: workflow.cores
    resources:
        gpu=1,
    params:
        model=lambda w, input: input.model.removesuffix(".json"),
        device=lambda w: plan_of(w).device,
    shell:
        "exec .venv/bin/python workflow/scripts/lease.py run --folder results/.server --no-server --accept 0 1 4 --"
        " .venv/bin/python eval/{wildcards.check}.py {params.model} --device {params.device} --json {output} > {log} 2>&1"
