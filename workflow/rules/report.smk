# From raw results to reports/<run>/, and the verdict.


rule run_info:
    input:
        models=lambda w: ancient(
            [f"{model_folder(m)}.json" for m in plan_of(w).models.values()]
        ),
        environments=lambda w: ancient(
            [environment_record(name) for name in ENVIRONMENTS]
        ),
        # The report says that the image is attested.
        image=lambda w: ancient(image_of(w, "attested")),
    output:
        "results/{run}/run.json",
    log:
        "results/{run}/logs/run_info.log",
    benchmark:
        "results/{run}/benchmarks/run_info.tsv"
    priority: 700
    conda:
        "../envs/engine.yaml"
    params:
        declaration=lambda w: json.dumps(declaration(w), sort_keys=True),
        environments=[
            f"--environment={name}={environment_python(name)}"
            for name in ("vllm", "aiperf")
        ],
    shell:
        ".venv/bin/python workflow/scripts/declare_run.py --declaration {params.declaration:q}"
        " --output {output} {params.environments:q} > {log} 2>&1"


rule report:
    input:
        results=lambda w: plan_of(w).results(),
        checks=lambda w: plan_of(w).checks(),
        info="results/{run}/run.json",
    output:
        json="reports/{run}/report.json",
        changelog=report("reports/{run}/CHANGELOG.md", category="Report"),
        note=report("reports/{run}/RELEASE_NOTE.md", category="Report"),
        html=report("reports/{run}/report.html", category="Report"),
        records="reports/{run}/requests.parquet",
    log:
        "results/{run}/logs/report.log",
    benchmark:
        "results/{run}/benchmarks/report.tsv"
    conda:
        "../envs/engine.yaml"
    params:
        results=lambda w, input: str(Path(input.info).parent),
        folder=lambda w, output: str(Path(output.json).parent),
    shell:
        ".venv/bin/python eval/render_report.py {params.results} --output {params.folder} > {log} 2>&1"


rule verdict:
    input:
        report="reports/{run}/report.json",
        checks=lambda w: plan_of(w).checks(),
    output:
        "results/{run}/verdict.json",
    log:
        "results/{run}/logs/verdict.log",
    benchmark:
        "results/{run}/benchmarks/verdict.tsv"
    conda:
        "../envs/engine.yaml"
    shell:
        ".venv/bin/python workflow/scripts/verdict.py {input.checks} --output {output} > {log} 2>&1"
