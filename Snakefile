from snakemake.utils import min_version

min_version("9.0")


configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/environments.smk"
include: "workflow/rules/model.smk"
include: "workflow/rules/sweep.smk"
include: "workflow/rules/arrivals.smk"
include: "workflow/rules/checks.smk"
include: "workflow/rules/accuracy.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/container.smk"


localrules:
    release,
    smoke,
    setup,


# The whole evaluation, as the profile says, up to the attested image (workflow/rules/container.smk).
rule release:
    input:
        target_files("release"),


# The same at the smallest scale.
rule smoke:
    input:
        target_files("smoke"),


# Only the environments.
rule setup:
    input:
        [environment_record(name) for name in ENVIRONMENTS],


onstart:
    begin()


onsuccess:
    finish()
    require_targets()
    go_on()


onerror:
    finish()
