"""Which model a request is for: the one that it names, or the best one here for what its route does."""

from __future__ import annotations

from slipstream.frontend.served import ServedModel
from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import bad_request


def served_for(call: Call, name: str | None, *tasks: str) -> ServedModel:
    """A model that can do one of these tasks, of which the first counts most. The error says what each model does."""
    models = call.state.engine.models
    served = call.state.engine.model(name, *tasks)
    if any(served.can(task) for task in tasks):
        return served
    wanted = tasks[0] if len(tasks) == 1 else f"any of {', '.join(tasks)}"
    if name:
        fact = f"the model {served.facts.name} does {_all(served)}, and this asks for {wanted}"
    else:
        fact = f"no model here does {wanted}"
    able = [other for other, each in models.items() if any(each.can(task) for task in tasks)]
    if able:
        way_out = f"choose {' or '.join(able)}"
    else:
        shown = "; ".join(f"{other} does {_all(each)}" for other, each in models.items())
        way_out = f"here {shown}"
    raise bad_request(f"{fact}; {way_out}", "model", "model_cannot")


def _all(served: ServedModel) -> str:
    pooling = served.facts.pooling
    tasks = (*(("generate",) if served.facts.generates else ()), *(() if pooling is None else pooling.tasks))
    return ", ".join(tasks)
