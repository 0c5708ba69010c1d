# Open-loop cells: Poisson arrivals, by the project's own load generator.


rule arrivals:
    input:
        ancient(cell_inputs),
    output:
        result="results/{run}/b{block}/{engine}/{model}/{cell}/r{rep}/result.json",
    log:
        "results/{run}/logs/b{block}/{engine}-{model}-{cell}-r{rep}.log",
    benchmark:
        "results/{run}/benchmarks/b{block}/{engine}-{model}-{cell}-r{rep}.tsv"
    wildcard_constraints:
        cell=any_of(CELL_IDS["poisson"]),
    priority: cell_priority
    conda:
        "../envs/engine.yaml"
    threads: workflow.cores
    resources:
        gpu=1,
    params:
        server=server_options,
        cell=cell_options,
        folder=lambda w, output: str(Path(output.result).parent),
    shell:
        # Snakemake has made the result's folder; the program makes it anew, by rename.
        "rm -rf {params.folder}; exec .venv/bin/python workflow/scripts/lease.py run {params.server:q} --"
        " .venv/bin/python eval/spec_open_arrivals.py {params.cell:q}"
        " > {log} 2>&1"
