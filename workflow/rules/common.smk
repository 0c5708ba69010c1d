"""What the rules share: the plan of each target and small functions that look things up in it."""

import atexit
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake_interface_executor_plugins.settings import ExecMode

ROOT = Path(workflow.basedir)
sys.path[:0] = [
    str(ROOT / folder)
    for folder in (".", "eval", "kernels", "containers", "workflow/scripts")
]

from make_env import CannotBuild, digest_of
from sparkinfer.errors import SparkinferError
from sparkinfer.identity import json_digest, short
from sparkinfer_containers.image.choice import Choice, choose
from sparkinfer_eval.lease.process import descendants
from sparkinfer_eval.plan.config import for_target, load_config
from sparkinfer_eval.plan.engines import command
from sparkinfer_eval.plan.run import (
    ACCURACY,
    ACCURACY_PREVIOUS,
    PREVIOUS,
    engine_file,
    make_plan,
)

PYTHON = ".venv/bin/python"
ENVIRONMENTS = ("engine", "vllm", "aiperf")
TARGETS = ("release", "smoke")
CHOICES = {}
# The engine that is shipped, and so signed.
ENGINE = "sparkinfer"
IS_MAIN = workflow.exec_mode == ExecMode.DEFAULT
# Whether this process starts jobs on its host: the workflow does, and so does a job that a cluster's scheduler started.
STARTS_JOBS = workflow.exec_mode != ExecMode.SUBPROCESS


def choose_engine(target, settings):
    """Image or source tree, for one target; what the main process chose holds for its jobs too."""
    name = f"EVALUATION_ENGINE_{target.upper()}"
    if IS_MAIN:
        found = choose(ROOT, settings.get("engine_from", "auto"), settings["device"])
        os.environ[name] = json.dumps(asdict(found))
    return Choice(**json.loads(os.environ[name]))


def engine_line(choice):
    """What a target measures, for the first lines of the output."""
    if choice.digest:
        return f"the image {choice.digest}"
    if choice.pending:
        return "the image, which is built first: the run is planned, and named, once its digest is known"
    return f"the source tree, not the shipped image ({choice.reason})"


def load_plans():
    """The plan of each target by run name. A fault of the configuration ends the workflow with its sentence."""
    try:
        settings, why = load_config(
            ROOT / "config" / "config.yaml",
            ROOT / "config" / "profiles",
            ROOT / "workflow" / "schemas" / "config.schema.yaml",
            workflow.config_settings.overwrite_config,
        )
        own = {target: for_target(settings, target) for target in TARGETS}
        CHOICES.update(
            {target: choose_engine(target, own[target]) for target in TARGETS}
        )
        found = {
            target: make_plan(ROOT, target, own[target], CHOICES[target].digest)
            for target in TARGETS
        }
    except (SparkinferError, CannotBuild) as error:
        raise WorkflowError(str(error)) from error
    if IS_MAIN:
        logger.info(f"profile {settings['profile']} ({why})")
        for target, choice in CHOICES.items():
            logger.info(f"engine of {target}: {engine_line(choice)}")
        for folder in sorted(
            {
                m.definition["missing"]
                for p in found.values()
                for m in p.models.values()
                if "missing" in m.definition
            }
        ):
            logger.warning(
                f"the model folder {folder} does not exist: a run will stop there, a dry run goes on"
            )
    return found


PLAN_OF = load_plans()
PLANS = {plan.run: plan for plan in PLAN_OF.values()}
CHOICE_OF = {plan.run: CHOICES[target] for target, plan in PLAN_OF.items()}
ENGINES = {
    (name, short(chosen.digest, 12)): chosen
    for plan in PLANS.values()
    for name, chosen in plan.engines.items()
}
MODELS = {
    (name, model.short_digest): model
    for plan in PLANS.values()
    for name, model in plan.models.items()
}
CELL_IDS = {
    kind: [
        c for p in PLANS.values() for c, cell in p.cells.items() if cell.kind == kind
    ]
    for kind in ("closed", "poisson")
}

if STARTS_JOBS:
    # The lease's watchdog watches this process: when it is gone, the server it holds is killed.
    os.environ.update(EVALUATION_WORKFLOW_PID=str(os.getpid()))


def any_of(values):
    """A regular expression that matches exactly the given texts."""
    import re

    return "|".join(sorted({re.escape(str(value)) for value in values})) or "(?!)"


wildcard_constraints:
    run=any_of(PLANS),
    engine=any_of(name for name, _ in ENGINES),
    model=any_of(name for name, _ in MODELS),
    block=r"\d+",
    rep=r"\d+",


def model_folder(model):
    """A model's folder. Its name says exactly which model it is, so that another definition is another folder."""
    return f"results/models/{model.name}-{model.short_digest}"


def model_manifest(wildcards):
    """The file that says that a job's model is in place."""
    return f"{model_folder(plan_of(wildcards).models[wildcards.model])}.json"


def environment_record(name):
    """The file that says that an environment is complete; its name holds the digest of the locks."""
    device = PLAN_OF["release"].device
    digest = short(json_digest(digest_of(name, device)))
    return f"results/environments/{device}/{name}-{digest}.json"


def environment_python(name):
    """The interpreter of an environment."""
    return PYTHON if name == "engine" else f".venvs/{name}/bin/python"


def target_files(target):
    """What a target asks for: the signed report, the verdict on it and, of an image, its way through a registry."""
    run = PLAN_OF[target].run
    if CHOICES[target].pending:
        return [CHOICES[target].pending]
    files = ["verdict"]
    # A statement is about the engine that this project ships.
    if ENGINE in PLAN_OF[target].engines:
        files += ["signed"]
        files += ["shipped", "verified"] if CHOICES[target].digest else []
    return [
        f"reports/{run}/report.json",
        *(f"results/{run}/{name}.json" for name in files),
    ]


def plan_of(wildcards):
    """The plan that a job belongs to."""
    return PLANS[wildcards.run]


def engine_source(plan, name):
    """The folder that an engine's server runs from; None for one that lives in its environment."""
    chosen = plan.engines[name]
    if chosen.engine.source["kind"] == "lock":
        return None
    return f"results/engines/{name}-{short(chosen.digest, 12)}"


def measured_image(digest):
    """The record of a chosen image whose digest starts with `digest`; None for a source tree."""
    for choice in CHOICES.values():
        if choice.digest and short(choice.digest, 12) == digest:
            return choice.record
    return None


def engine_source_inputs(wildcards):
    """What an engine's source is made from, besides the checkout."""
    image = measured_image(wildcards.digest)
    return [environment_record("engine"), *([image] if image else [])]


def engine_origin(wildcards):
    """Options of engine_source.py that say where an engine's source comes from."""
    image = measured_image(wildcards.digest)
    if image:
        built = Path(image).parent / "built"
        return f"--image {built} --device {PLAN_OF['release'].device}"
    tag = ENGINES[wildcards.engine, wildcards.digest].tag
    return f"--tag {tag}" if tag else ""


def cell_inputs(wildcards):
    """What must exist before a cell can be measured: environments, model, engine source, prompts, run.json, checks.

    Of a cell that is measured already only what is still there counts: a file that has gone missing since, or has to be
    made for another cell, is no reason to measure it again.
    """
    folder = f"results/{wildcards.run}"
    cell = f"{folder}/b{wildcards.block}/{wildcards.engine}/{wildcards.model}/{wildcards.cell}/r{wildcards.rep}"
    files = [
        *server_inputs(wildcards),
        f"{folder}/prompts/{wildcards.model}/b{wildcards.block}/{wildcards.cell}.jsonl",
        f"{folder}/run.json",
        # Checks need the device without a server on it, so they come first.
        *plan_of(wildcards).device_checks(),
    ]
    return (
        [file for file in files if Path(file).exists()]
        if Path(f"{cell}/result.json").exists()
        else files
    )


def server_inputs(wildcards):
    """What must exist before a server can be started: environments, model, engine source."""
    plan = plan_of(wildcards)
    chosen = plan.engines[wildcards.engine]
    files = [
        environment_record(name)
        for name in ("engine", "aiperf", chosen.engine.environment)
    ]
    source = engine_source(plan, wildcards.engine)
    return [*dict.fromkeys(files), model_manifest(wildcards)] + (
        [f"{source}.json"] if source else []
    )


def server_options(wildcards):
    """Options of lease.py for a job's server."""
    plan = plan_of(wildcards)
    chosen = plan.engines[wildcards.engine]
    model = plan.models[wildcards.model]
    session = f"b{wildcards.block}-r{wildcards.rep}"
    options = {
        "folder": "results/.server",
        "engine": str(
            engine_file(
                Path(), plan.settings, wildcards.engine, CHOICE_OF[plan.run].digest
            )
        ),
        "python": environment_python(chosen.engine.environment),
        "model": model_folder(model),
        "served-name": model.name,
        "device": plan.device,
        "dtype": model.dtype,
        "max-model-len": model.max_model_len,
        "session": session,
        "engine-digest": chosen.digest,
        "cache": "results/cache",
        "log": f"results/{plan.run}/logs/servers/{wildcards.engine}-{model.name}-{session}.log",
        "facts": f"results/{plan.run}/servers/{wildcards.engine}-{model.name}-{session}.json",
        "record": f"results/{plan.run}",
        "engine-name": wildcards.engine,
        "model-name": model.name,
        "cell": wildcards.cell,
        "block": wildcards.block,
        "rep": wildcards.rep,
    }
    if engine_source(plan, wildcards.engine):
        options["source"] = engine_source(plan, wildcards.engine)
    if plan.settings.get("port"):
        options["port"] = plan.settings["port"]
    return [
        item for name, value in options.items() for item in (f"--{name}", str(value))
    ]


def cell_options(wildcards):
    """Options of eval/run_cell.py for a job."""
    plan = plan_of(wildcards)
    cell = plan.cells[wildcards.cell]
    folder = f"results/{plan.run}/b{wildcards.block}/{wildcards.engine}/{wildcards.model}/{wildcards.cell}/r{wildcards.rep}"
    options = {
        "run": plan.run,
        "block": wildcards.block,
        "engine": wildcards.engine,
        "engine-version": "{version}",
        "engine-digest": "{engine_digest}",
        "model": model_folder(plan.models[wildcards.model]),
        "model-name": wildcards.model,
        "url": "{url}",
        "served-name": "{served_name}",
        "rep": wildcards.rep,
        "cell": wildcards.cell,
        "cells": plan.settings.get("cells_file", "config/cells.yaml"),
        "scale": plan.settings["scale"],
        "overrides": json.dumps(plan.settings.get("scale_overrides", {})),
        "prompts": f"results/{plan.run}/prompts/{wildcards.model}/b{wildcards.block}/{wildcards.cell}.jsonl",
        "out": folder,
    }
    return [
        item for name, value in options.items() for item in (f"--{name}", str(value))
    ]


def scoring(wildcards):
    """A scoring job's wildcards as those of a cell: it shares the server of the first block and repetition."""
    own = {"block": "1", "rep": "1", "cell": "accuracy"}
    return SimpleNamespace(
        run=wildcards.run, engine=wildcards.engine, model=wildcards.model, **own
    )


def accuracy_options(wildcards, names):
    """Options of eval/accuracy.py that the settings give, of those named."""
    asked = plan_of(wildcards).settings.get("accuracy", {})
    return [
        item
        for name in names
        if name in asked
        for item in (f"--{name.replace('_', '-')}", str(asked[name]))
    ]


def cell_priority(wildcards):
    """All cells of one server follow one another, and servers in the plan's order."""
    slot = (int(wildcards.block), wildcards.model, int(wildcards.rep), wildcards.engine)
    return 10 + plan_of(wildcards).priority(*slot)


def declaration(wildcards):
    """The run's declaration for run.json; digests of models are filled in when they exist."""
    plan = plan_of(wildcards)
    marks = {
        "python": "python",
        "served_name": "NAME",
        "port": "PORT",
        "device": plan.device,
        "seed": "0",
    }
    model = next(iter(plan.models.values()))
    values = {
        **marks,
        "model": model_folder(model),
        "dtype": model.dtype,
        "cache": "results/cache",
        "step_trace": "STEPS",
        "threads": "THREADS",
    }
    values |= {
        "max_model_len": str(model.max_model_len),
        "source": "SOURCE",
        "unpacked": "IMAGE",
    }
    engines = []
    for name, chosen in plan.engines.items():
        argv, env = command(chosen.engine, plan.device, values, environ={})
        label = f"{chosen.engine.title} {chosen.version}"
        engines.append(
            {
                "name": name,
                "label": label,
                "version": chosen.version,
                "digest": chosen.digest,
                "command": argv,
                "environment": env,
            }
        )
    settings = plan.settings
    models = [
        {
            "name": m.name,
            "label": m.label,
            "dtype": m.dtype,
            "random_weights": m.random_weights,
            "source": json.dumps(m.source, sort_keys=True),
            "definition": m.definition,
            "folder": model_folder(m),
        }
        for m in plan.models.values()
    ]
    return {
        "run": plan.run,
        "version": plan.version,
        "profile": plan.profile,
        "scale": {
            "statement": settings.get("scale_statement", f"Scale {settings['scale']}."),
            "full": settings["scale"] == "full" and not settings.get("scale_overrides"),
            "settings": settings["resolved_scale"],
        },
        "engines": engines,
        "models": models,
        "container": CHOICE_OF[plan.run].container(),
        "cells": list(plan.cells),
        "checks": plan.check_names(),
        "blocks": settings["blocks"],
        "reps": settings["reps"],
        "commands": [{"name": f"this {plan.target}", "command": ["make", plan.target]}],
    }


def stop_jobs(*_):
    """End the running jobs, then the workflow, as Ctrl-C in a terminal does."""
    import signal

    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    raise KeyboardInterrupt


def begin():
    """At the workflow's start: let SIGTERM and SIGINT end the running job at once.

    By default Snakemake waits for it, which can take longer than a machine that shuts down allows.
    """
    import signal

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_jobs)


def finish():
    """At the workflow's end: stop the server that is held."""
    if Path(PYTHON).exists():
        subprocess.run(
            [
                PYTHON,
                "workflow/scripts/lease.py",
                "stop",
                "--folder",
                "results/.server",
            ],
            check=False,
        )


def asked_targets():
    """The targets of this invocation."""
    return {str(target) for target in workflow.dag_settings.targets} or {"release"}


def start_again():
    """Start this command again in the same process."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv])


def go_on():
    """After the build of an image that was pending: plan and measure the run that its digest names."""
    if CHOICES["release"].pending and "release" in asked_targets():
        logger.info("the image is built: starting again to measure it")
        atexit.register(start_again)


def require_targets():
    """Raise WorkflowError when a target that was asked for is not there although no job failed.

    Snakemake can drop a target while it repeats a job that an earlier invocation was killed in; once that job is done
    the next invocation goes on.
    """
    asked = asked_targets()
    missing = [
        file
        for name in TARGETS
        if name in asked
        for file in target_files(name)
        if not Path(file).exists()
    ]
    if missing and not (workflow.dag_settings.until or workflow.dag_settings.omit_from):
        raise WorkflowError(
            f"{missing[0]} is not made yet: an interrupted job has been repeated; start again to go on"
        )
