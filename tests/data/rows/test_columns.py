"""Columns of any name as keys, in templates and for functions, and those that nothing reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, DataConfig, SourceConfig
from keel.configs.sections.evaluation import BOXED
from keel.data.dataset import load_dataset
from keel.data.items import Loaded
from keel.data.jsonl import load_jsonl
from keel.data.summary import literal_lines, source_lines
from keel.rewards.checks import check_spec
from keel.rewards.rules.verifiers import verifier_for

CRITERION = {"name": "cause", "text": "Names the cause.", "weight": 1}
OWN = {"rewards": {"correct": 1.0, "mine.brief": 0.1}}


def source(folder: Path, *rows: dict[str, Any], **knobs: Any) -> SourceConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(**{"name": "s", "source": "jsonl", "path": str(path), **knobs})


def load(folder: Path, *rows: dict[str, Any], **knobs: Any) -> Loaded:
    return load_jsonl(source(folder, *rows, **knobs), check_spec)


def refused(folder: Path, *rows: dict[str, Any], **knobs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *rows, **knobs)
    return str(caught.value)


def asked(folder: Path, *rows: dict[str, Any], **knobs: Any) -> list[str]:
    return [item.prompt.messages[-1]["content"] for item in load(folder, *rows, **knobs).items]


def test_gsm8ks_answers_are_what_follows_its_mark(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 1,200"}
    knobs: dict[str, Any] = {"columns": {"prompt": "question"}, "answer_after": "####"}
    (item,) = load(tmp_path, row, **knobs).items
    assert item.prompt.reward == {"kind": "answer", "answer": "1,200", "match": "math"}
    assert verifier_for(item.prompt.reward)("It is 1200.") == 1.0
    for answer, words in (
        ("24", "has no '####'"),
        ("2 #### ", "has nothing after the last '####'"),
    ):
        said = refused(tmp_path, row, {**row, "answer": answer}, **knobs)
        assert f"rows.jsonl:2: `answer` {words} (data.sources[s].answer_after)" in said


def test_a_template_over_a_prompt_that_is_not_there_names_the_column(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "24", "hint": "Count."}
    knobs: dict[str, Any] = {"template": "boxed"}
    said = refused(tmp_path, row, **knobs, columns={"prompt": "qestion"})
    assert "data.sources[s].columns.prompt = 'qestion'" in said
    assert said.endswith("it has question, answer, hint; did you mean `question`?")
    assert "columns: {prompt: question}" in refused(tmp_path, row, **knobs)
    said = refused(tmp_path, row, template="{question} {hnit}")
    assert "it has question, answer, hint; did you mean {hint}? (for the text" in said


def test_a_row_without_the_answer_that_its_column_should_have_is_no_row_for_functions(
    tmp_path: Path,
) -> None:
    """Whose mean would count as `correct` there."""
    whole, lacks = {"task": "a", "gold": "1"}, {"task": "b", "gold": None}
    columns = {"prompt": "task", "answer": "gold"}
    for row in (lacks, {"task": "b"}):
        said = refused(tmp_path, whole, row, columns=columns, **OWN)
        assert "rows.jsonl:2: no `answer` (data.sources[s].columns: 'gold')" in said
    skipping = load(tmp_path, whole, lacks, columns=columns, on_bad_line="skip", **OWN)
    assert len(skipping.items) == len(skipping.skipped) == 1


def test_rows_that_only_functions_judge_are_counted_beside_others(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "c", "answer": None}]
    made = source(tmp_path, *rows, **OWN)
    assert load_jsonl(made, check_spec).unanswered == 2
    data = DataConfig(sources=(made,))
    dataset = load_dataset(data, seed=0)
    (line,) = source_lines(Config(data=data), dataset)
    assert "2 read without anything to judge by but functions" in line
    assert load(tmp_path, *rows[1:], **OWN).unanswered == 0, "of all of them: that is meant"


def test_columns_that_are_no_keys_reach_functions(tmp_path: Path) -> None:
    row = {
        "problem": "a",
        "solution": 0.10,
        "answer": "all",
        "level": 3,
        "reward_model": {"x": 1},
    }
    columns = {"prompt": "problem", "answer": "solution"}
    (item,) = load(tmp_path, row, columns=columns, **OWN).items
    further = {"answer": "all", "level": 3, "reward_model": {"x": 1}}
    assert item.prompt.reward["columns"] == further and item.prompt.reward["answer"] == "0.1"
    nested = {"prompt": "problem", "answer": "reward_model.x"}
    (item,) = load(tmp_path, row, columns=nested, **OWN).items
    assert item.prompt.reward["answer"] == "1"


@pytest.mark.parametrize(
    ("row", "further"),
    [
        ({"reference": "r", "language": "de", "partial": True, "match": "m"}, ...),
        ({"answer": "1", "language": "de", "tolerance": 0.1}, {"language": "de"}),
        ({"answer": "1", "match": "exact", "tolerance": 0.1}, {"tolerance": 0.1}),
        (
            {"criteria": [CRITERION], "reference": "r", "match": "m"},
            {"match": "m"},
        ),
        ({"environment": {"a": 1}}, ...),
        ({"partial": None}, {}),
    ],
)
def test_keys_that_mean_nothing_in_a_row_are_columns_too(
    tmp_path: Path, row: dict[str, Any], further: Any
) -> None:
    given = {"prompt": "a", "id": "1", "topic": "t", **row}
    (item,) = load(tmp_path, given, **OWN).items
    assert item.prompt.reward["columns"] == {"topic": "t", **(row if further is ... else further)}
    renamed = {**given, "ref": given.pop("reference", "r")}
    (item,) = load(tmp_path, renamed, columns={"reference": "ref"}, **OWN).items
    assert ("ref" in item.prompt.reward["columns"]) == ("criteria" not in row)


@pytest.mark.parametrize(
    "judged",
    [
        {"answer": "4"},
        {"criteria": [{"name": "n", "text": "t", "weight": 1}]},
        {"tests": [{"stdin": "1", "stdout": "1"}]},
        {"refuse": True},
        {"reward": {"kind": "proof"}},
        {"reward": {"kind": "verification", "problem": "p", "proof": "q", "score": 1}},
        {},
    ],
    ids=str,
)
def test_functions_see_columns_whatever_else_judges(tmp_path: Path, judged: dict[str, Any]) -> None:
    (item,) = load(tmp_path, {"prompt": "a", **judged, "level": 3}, **OWN).items
    assert item.prompt.reward["columns"] == {"level": 3}


def test_what_is_null_is_not_there(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "refuse": True}]
    keys = ("prompt", "messages", "answer", "match", "refuse", "tests", "tolerance", "id")
    filled = [{key: row.get(key) for key in keys} for row in rows]
    plain = [item.prompt for item in load(tmp_path, *rows).items]
    assert [item.prompt for item in load(tmp_path, *filled).items] == plain


def test_a_prompt_that_was_kept_has_its_columns_still(tmp_path: Path) -> None:
    (item,) = load(tmp_path, {"id": "x", "prompt": "a", "answer": "1", "level": 3}, **OWN).items
    kept = {"id": "x", "messages": item.prompt.messages, "reward": item.prompt.reward}
    (again,) = load(tmp_path, {**kept, "pass_rate": 0.5}, **OWN).items
    assert again.prompt == item.prompt


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows.jsonl has no such column, it has question, answer; did you mean `question`?": (
        {"question": "a", "answer": "b"},
        {"columns": {"prompt": "questoin"}},
    ),
    "no such column, it has question, answer; did you mean `answer`?": (
        {"question": "a", "answer": "b"},
        {"columns": {"prompt": "question", "answer": "solution"}},
    ),
    "no such column, it has question, gold; did you mean `gold`?": (
        {"question": "a", "gold": "b"},
        {"columns": {"prompt": "question", "answer": "golden"}},
    ),
    "rows.jsonl: its first row has no `answer`, it has question, solution. Say which column "
    "that is: data.sources[s].columns: {prompt: question, answer: solution}": (
        {"question": "a", "solution": "b"},
        {},
    ),
    "its first row has no `answer`, it has prompt, x. Say which column that is: data.sources[s]."
    "columns: {answer: COLUMN}": (
        {"prompt": "a", "x": "b"},
        {},
    ),
    "data.sources[s].columns.promt: there is no such key; did you mean prompt?": (
        {"question": "a", "answer": "b"},
        {"columns": {"promt": "question"}},
    ),
    "data.sources[s].columns.tolerance = 'tol': no row of": (
        {"prompt": "a", "answer": "b"},
        {"columns": {"tolerance": "tol"}},
    ),
    "rows.jsonl:1: `anwser` is no key; did you mean `answer`? Rename it": (
        {"prompt": "a", "anwser": "4"},
        OWN,
    ),
    "rows.jsonl:1: `tolerence` is no key; did you mean `tolerance`? Rename it, or say": (
        {"prompt": "a", "answer": "1", "tolerence": 0.1},
        {},
    ),
    "rows.jsonl:1: has `answer` and `tests`; keep one, or say that a column is another thing": (
        {"prompt": "a", "answer": "1", "tests": "public"},
        {},
    ),
    "rows.jsonl:1: has no column 'hint', which data.sources[s].template asks for; it has prompt": (
        {"prompt": "a", "answer": "1"},
        {"template": "{prompt} {hint}"},
    ),
    "ends with a message of the tool, and a template is for users'": (
        {"messages": [{"role": "tool", "content": "a"}], "answer": "1"},
        {"template": "boxed"},
    ),
    "has a conversation, and a raw prompt is one text": (
        {"messages": [{"role": "user", "content": "a"}] * 2, "answer": "1"},
        {"raw": True},
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_fit_is_named_with_place_and_cure(words: str, tmp_path: Path) -> None:
    row, knobs = WRONG[words]
    assert words in refused(tmp_path, row, **knobs)


def test_a_column_that_other_rows_have_is_the_rows_mistake(tmp_path: Path) -> None:
    """And so it is where such rows are left out."""
    rows = [{"question": "a", "answer": "1"}, {"asked": "b", "answer": "1"}]
    columns = {"prompt": "question"}
    said = refused(tmp_path, *rows, columns=columns)
    assert "rows.jsonl:2: no `prompt` (data.sources[s].columns: 'question')" in said
    loaded = load(tmp_path, *reversed(rows), columns=columns, on_bad_line="skip")
    assert len(loaded.items) == 1 and "rows.jsonl:1: no `prompt`" in loaded.skipped[0]


def test_a_key_that_is_not_in_the_file_leaves_its_name_to_a_column(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": "1", "tests": "public", "tolerence": "wide"}
    columns = {"tests": "", "tolerance": ""}
    loaded = load(tmp_path, row, columns=columns)
    assert loaded.items[0].prompt.reward == {"kind": "answer", "answer": "1", "match": "math"}
    assert set(loaded.unread) == {"tests", "tolerence"}


def test_what_nothing_reads_is_noted_once(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": "1", "tools": [], "level": 1, "pass_rate": 0.5}
    rows = [row, {**row, "prompt": "b", "topic": "x"}]
    path = tmp_path / "rows.jsonl"
    wanted = {"tools": f"{path}:1", "level": f"{path}:1", "topic": f"{path}:2"}
    assert load(tmp_path, *rows).unread == wanted
    template = "{level} {topic} {prompt}"
    assert set(load(tmp_path, rows[1], template=template).unread) == {"tools"}
    assert not load(tmp_path, *rows, **OWN).unread, "functions see them all"


def test_an_object_that_a_key_is_read_from_is_read(tmp_path: Path) -> None:
    row = {"prompt": "a", "reward_model": {"ground_truth": "1", "style": "rule"}, "level": 1}
    loaded = load(tmp_path, row, columns={"answer": "reward_model.ground_truth"})
    assert set(loaded.unread) == {"level"}


def test_templates_put_columns_into_words(tmp_path: Path) -> None:
    row = {"question": "1+1?", "hint": 0.50, "answer": "2", "more": {"x": ["é"]}}
    columns = {"prompt": "question"}
    for template, words in (
        ("Question: {question}\nHint: {hint}", "Question: 1+1?\nHint: 0.5"),
        ("{prompt} {more.x} {{prompt}} \\boxed{}", '1+1? ["é"] {prompt} \\boxed{}'),
        ("boxed", f"1+1?\n{BOXED}"),
    ):
        assert asked(tmp_path, row, columns=columns, template=template) == [words]
    assert asked(tmp_path, row, template="{question}") == ["1+1?"], "it needs no `prompt`"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert asked(tmp_path, {"prompt": chat, "answer": "2"}, template="boxed") == [f"u\n{BOXED}"]
    with pytest.raises(ConfigError, match=r"template = 'boxd'"):
        source(tmp_path, template="boxd")


def test_a_question_is_the_same_in_the_words_of_every_template(tmp_path: Path) -> None:
    """… unless the template adds something of the row's own."""
    rows = [{"prompt": "1+1?", "answer": "2", "hint": hint} for hint in "abc"]
    assert len({item.question for item in load(tmp_path, *rows, template="boxed").items}) == 1
    own = load(tmp_path, *rows, template="{prompt} {hint}").items
    assert len({item.question for item in own}) == 3
    plain = load(tmp_path, rows[0]).items[0]
    assert load(tmp_path, rows[0], template="boxed").items[0].question == plain.question


def test_raw_prompts_have_no_system_message_and_no_environment(tmp_path: Path) -> None:
    (item,) = load(tmp_path, {"prompt": "Q: a\nA:", "answer": "b"}, raw=True).items
    assert (
        item.prompt.raw and not load(tmp_path, {"prompt": "a", "answer": "b"}).items[0].prompt.raw
    )
    for knobs, words in (
        ({"system": "Be brief."}, r"data.sources\[s\].system = 'Be brief.'"),
        ({"system_template": "reasoning"}, r"system_template = 'reasoning'"),
        ({"environment": {"target": "a:B"}}, r"data.sources\[s\].raw = True"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_dataset_of(tmp_path, knobs)


def load_dataset_of(folder: Path, knobs: dict[str, Any]) -> None:
    path = source(folder, {"prompt": "a", "answer": "b"}).path
    one = {"name": "s", "source": "jsonl", "path": path, "raw": True, **knobs}
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({"data": {"sources": [one]}}))
    load_dataset(load_config(recipe).data, seed=0)


@pytest.mark.parametrize(
    ("system", "named"),
    [
        ("Answer in {language}.", "{language}"),
        ("{rules}", "{rules}"),
        (r"Write \boxed{answer}, \frac{a}{b}, x_{i}, 2^{n} or \{x\}.", ""),
        ('Write {"answer": 1}, {} or {{answer}}.', ""),
    ],
)
def test_a_system_message_that_looks_like_a_template_is_told(
    tmp_path: Path, system: str, named: str
) -> None:
    lines = literal_lines(Config(data=DataConfig(sources=(source(tmp_path, system=system),))))
    assert len(lines) == bool(named)
    assert all(f"data.sources[s].system: {named} stands there as it is" in line for line in lines)
