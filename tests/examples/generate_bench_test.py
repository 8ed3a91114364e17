"""The benchmark of generation writes tokens per second of both models, with the machine and the settings."""

from __future__ import annotations

import json

from absl.testing import flagsaver

from tools.bench import generate

TINY = ["--layers=1", "--width=64", "--inner=64", "--heads=2", "--kv_heads=2", "--vocabulary=64"]


def test_a_document_has_the_rates_of_both_models(tmp_path, capsys):
    out = tmp_path / "generate.json"
    generate.flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(batches=["1", "2"], rounds=2, json_out=str(out)):
        generate.main(["generate.py", *TINY, "--length=4", "--tokens=3"])
    document = json.loads(out.read_text())
    assert [row["batch"] for row in document["rows"]] == [1, 2]
    for row in document["rows"]:
        rates = row["tokens_per_second"]
        assert {"torch, eager", "rowwise, eager"} <= set(rates)
        assert all(0 < rate["least"] <= rate["median"] for rate in rates.values())
    assert document["machine"]["torch"] and document["settings"]["layers"] == 1
    assert "batch 2, rowwise, eager: " in capsys.readouterr().out
