"""Adapters over HTTP: named as the model, listed, loaded and unloaded behind the admin key."""

from __future__ import annotations

import json

import pytest
from asgi import at_door

from slipstream.contracts.messages import Output
from slipstream.contracts.request import FinishReason
from slipstream.params.lora import LoRARequest

ASK = {"prompt": "hi", "max_tokens": 4}
MODEL = {"max_lora_rank": 16, "adapters": (LoRARequest("sql", 1, "/adapters/sql"),)}


def test_an_adapter_is_named_as_the_model(folder):
    async def scenario(door):
        plain, adapted = (
            await door.post("/v1/completions", ASK),
            await door.post("/v1/completions", ASK | {"model": "sql"}),
        )
        chat = await door.post("/v1/chat/completions", {"model": "sql", "messages": [{"role": "user", "content": "a"}]})
        assert [each.json()["model"] for each in (plain, adapted, chat)] == ["tiny", "sql", "sql"]
        loras = [submit.lora for submit in door.core.submits]
        assert loras[0] is None and {lora.lora_path for lora in loras[1:]} == {"/adapters/sql"}
        listed = (await door.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "sql"]
        assert listed[1]["parent"] == "tiny" and "parent" not in listed[0]
        assert (await door.get("/v1/models/sql")).json()["root"] == "/adapters/sql"
        missing = await door.post("/v1/completions", ASK | {"model": "other"})
        assert missing.status == 404 and "tiny, sql" in missing.error

    at_door(folder, scenario, model=MODEL)


def test_an_adapter_that_cannot_be_read_is_the_clients_error(folder):
    async def scenario(door):
        exchange = door.begin("POST", "/v1/completions", ASK | {"model": "sql"})
        await door.core.until(lambda: door.core.submits)
        error = Output(
            door.core.submits[0].request_id, 0, [], finish_reason=FinishReason.ERROR, error="no such folder",
            param="lora_request",
        )  # fmt: skip
        door.core.say(error)
        await exchange.end()
        assert exchange.status == 400 and exchange.json()["error"]["param"] == "model"

    at_door(folder, scenario, model=MODEL, answers=False)


def write_settings(folder, **settings):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | settings))
    return str(folder)


def test_adapters_are_loaded_and_unloaded(folder, tmp_path):
    path = write_settings(tmp_path / "allowed" / "new")
    bad = write_settings(tmp_path / "allowed" / "dora", use_dora=True)
    large = write_settings(tmp_path / "allowed" / "large", r=32)
    mixed = write_settings(tmp_path / "allowed" / "mixed", r=32, rank_pattern={".*": 8})
    outside = write_settings(tmp_path / "outside")
    (tmp_path / "allowed" / "link").symlink_to(outside)
    root = {"authorization": "Bearer root"}

    async def scenario(door):
        async def load(**body):
            return await door.post("/v1/load_lora_adapter", body, **root)

        assert (await door.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path})).status == 401
        done = await load(lora_name="new", lora_path=path)
        assert done.status == 200, done.said
        assert (await door.post("/v1/completions", ASK | {"model": "new"}, **root)).json()["model"] == "new"
        for body, words in [
            ({"lora_name": "new", "lora_path": path}, "there is a model new already"),
            ({"lora_name": "tiny", "lora_path": path}, "there is a model tiny already"),
            ({"lora_name": "x", "lora_path": bad}, "DoRA"),
            ({"lora_name": "x", "lora_path": large}, "has rank 32, and the engine takes up to 16"),
            ({"lora_name": "x", "lora_path": f"{path}/none"}, "has no adapter_config.json"),
            ({"lora_name": "x", "lora_path": outside}, "outside of the folders"),
            ({"lora_name": "x", "lora_path": str(tmp_path / "allowed" / "link")}, "outside of the folders"),
            ({"lora_name": "x", "lora_path": f"{path}/../../outside"}, "outside of the folders"),
            ({"lora_name": "", "lora_path": path}, "lora_name"),
            ({"lora_name": "x", "lora_path": path, "more": 1}, "more"),
        ]:
            refused = await load(**body)
            assert refused.status == 400 and words in refused.error, (body, refused.error)
            field = "lora_name" if words.endswith(("lora_name", "already")) else "lora_path"
            assert refused.json()["error"]["param"] == ("more" if words == "more" else field)
        assert (await load(lora_name="mixed", lora_path=mixed)).status == 200
        first = door.core.submits[-1].lora
        assert (await load(lora_name="new", lora_path=path, load_inplace=True)).status == 200
        await door.post("/v1/completions", ASK | {"model": "new"}, **root)
        assert door.core.submits[-1].lora.lora_int_id > first.lora_int_id  # read again
        assert (await door.post("/v1/unload_lora_adapter", {"lora_name": "new"}, **root)).status == 200
        gone = await door.post("/v1/unload_lora_adapter", {"lora_name": "new"}, **root)
        assert gone.status == 404 and gone.json()["error"]["param"] == "lora_name"
        assert (await door.post("/v1/completions", ASK | {"model": "new"}, **root)).status == 404

    at_door(folder, scenario, model=MODEL, admin_key="root", api_key=["user"], lora_folders=[str(tmp_path / "allowed")])


@pytest.mark.parametrize(("settings", "status"), [({}, 403), ({"lora_folders": ["/"], "workers": 2}, 409)])
def test_loading_is_refused_without_folders_or_with_several_front_ends(folder, settings, status):
    async def scenario(door):
        body = {"lora_name": "a", "lora_path": "/x"}
        assert (await door.post("/v1/load_lora_adapter", body, authorization="Bearer root")).status == status

    at_door(folder, scenario, model=MODEL, admin_key="root", **settings)
