"""Published data sets and question-answer files, brought into the columns that training reads. Writes no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.config.hub import HubError, fetch_folder
from dovetail.data.errors import DataError, DataNotHereError
from dovetail.data.files import ENDINGS, prompt_row, read_rows

GSM8K_SOURCE = "openai/gsm8k"
MATH_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
_FOLDER_OF_ALL = {GSM8K_SOURCE: "main", MATH_SOURCE: "data"}
"""The folder of the repository that holds all problems; the others hold them in another form, or a part of them."""
GSM8K_INSTRUCTION = 'Think step by step, then write the final number after "####".'
MATH_INSTRUCTION = "Think step by step, then write the final answer in \\boxed{}."


def gsm8k_rows(
    raw: Iterable[Mapping[str, Any]],
    split: str,
    *,
    instruction: str = GSM8K_INSTRUCTION,
    system: str | None = None,
    max_calculations: int | None = None,
) -> list[dict[str, Any]]:
    """`question`, `answer` with `#### number` at its end.

    `max_calculations` leaves out problems whose solution marks more (`<<3+4=7>>`): an easier set to begin with.
    """
    rows = []
    for index, row in enumerate(raw):
        question, answer = _field(row, "question", index), _field(row, "answer", index)
        _, mark, truth = str(answer).rpartition("####")
        if not mark:
            raise DataError(f"row {index} of GSM8K has no '####' in its answer: {str(answer)[-60:]!r}.")
        if max_calculations is not None and str(answer).count("<<") > max_calculations:
            continue
        info = {"split": split, "index": index, "answer": answer, "question": question}
        asked = _ask(str(question), instruction)
        rows.append(_math_row(GSM8K_SOURCE, asked, truth.strip().replace(",", ""), info, system))
    return rows


def math_rows(
    raw: Iterable[Mapping[str, Any]],
    split: str,
    extract_answer: Callable[[str], str | None],
    *,
    instruction: str = MATH_INSTRUCTION,
    system: str | None = None,
) -> list[dict[str, Any]]:
    """`problem`, `solution` with a boxed answer; `extract_answer` finds it. Level and type go to extra_info."""
    rows = []
    for index, row in enumerate(raw):
        solution = str(_field(row, "solution", index))
        truth = extract_answer(solution)
        if truth is None:
            raise DataError(f"row {index} of MATH has no \\boxed answer in its solution: {solution[-60:]!r}.")
        info = {"split": split, "index": index, "level": str(row.get("level", "")), "type": str(row.get("type", ""))}
        asked = _ask(str(_field(row, "problem", index)), instruction)
        rows.append(_math_row(MATH_SOURCE, asked, truth, info, system))
    return rows


def _math_row(source: str, question: str, truth: str, info: dict[str, Any], system: str | None) -> dict[str, Any]:
    return prompt_row(
        data_source=source, question=question, ground_truth=truth, ability="math", extra_info=info, system=system
    )


def question_rows(
    raw: Iterable[Mapping[str, Any]],
    split: str,
    *,
    data_source: str,
    question_field: str = "question",
    answer_field: str = "answer",
    instruction: str = "",
    ability: str = "",
    system: str | None = None,
) -> list[dict[str, Any]]:
    """Any file with a question, as text or as chat messages, and an answer field."""
    return [
        prompt_row(
            data_source=data_source,
            question=_asked(_field(row, question_field, index), instruction, f"row {index}: {question_field!r}"),
            ground_truth=_field(row, answer_field, index),
            ability=ability,
            extra_info={"split": split, "index": index},
            system=system,
        )
        for index, row in enumerate(raw)
    ]


def usable_rows(raw: Sequence[Mapping[str, Any]], question_field: str, answer_field: str) -> list[dict[str, Any]]:
    """The rows, in the order of the file, so that a message names the row a user will find.

    Answers of several kinds (4, 3.5, "four") become text: a column of a file has one kind, and 4 would become 4.0.
    """
    if not raw:
        raise DataError("there are no rows.")
    rows = [dict(row) for row in raw]
    for index, row in enumerate(rows):
        for option, field in (("--question-field", question_field), ("--answer-field", answer_field)):
            _field(row, field, index, f"; name the column that holds it with {option}")
    kinds = {type(row[answer_field]) for row in rows}
    if len(kinds) > 1 and kinds <= {str, int, float, bool}:
        return [{**row, answer_field: str(row[answer_field])} for row in rows]
    return rows


def _asked(question: Any, instruction: str, where: str) -> str | list[dict[str, Any]]:
    """A question with the instruction behind it; in a conversation, behind its last message."""
    if isinstance(question, str | int | float):
        return _ask(str(question), instruction)
    messages = [dict(entry) for entry in question if isinstance(entry, Mapping)] if isinstance(question, list) else []
    if not messages or len(messages) < len(question) or not all({"role", "content"} <= set(m) for m in messages):
        raise DataError(f"{where} is {question!r}; it must be text or a list of messages with role and content.")
    if instruction:
        messages[-1]["content"] = _ask(str(messages[-1]["content"]), instruction)
    return messages


def _ask(question: str, instruction: str) -> str:
    return f"{question.strip()} {instruction}".strip()


def _field(row: Mapping[str, Any], name: str, index: int, way_out: str = "") -> Any:
    if name not in row:
        raise DataError(f"row {index} has no {name!r}, only {', '.join(row)}{way_out}.")
    if row[name] is None:
        raise DataError(f"row {index}: {name!r} is null; fill it in, or take the row out.")
    return row[name]


def published_rows(source: str, path: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split of GSM8K or MATH: of a file, a folder a copy of the repository; of the hub without one."""
    folder = _FOLDER_OF_ALL[source]
    if path is not None:
        inside = Path(path).expanduser() / folder
        return all_rows(str(inside) if inside.is_dir() else path, split)
    try:
        return all_rows(str(fetch_folder(source, folder, kind="dataset")), split)
    except HubError as error:
        copied = f"`hf download {source} --repo-type dataset --local-dir FOLDER`"
        raise DataNotHereError(f"{error} `dovetail data` also takes a copy of the FOLDER of {copied}.") from error


def has_splits(path: str) -> bool:
    """Whether it is a folder of files, each named after its split. `datasets.save_to_disk` leaves one data set."""
    folder = Path(path).expanduser()
    return folder.is_dir() and not (folder / "state.json").exists()


def all_rows(path: str, split: str) -> list[dict[str, Any]]:
    """All rows of a file, here or on the hub, or of the file in a folder whose name begins with the split."""
    folder, files = Path(path).expanduser(), [path]
    if has_splits(path):
        files = sorted(str(file) for file in folder.rglob(f"{split}*") if file.suffix in ENDINGS)
        if not files:
            raise DataError(f"{folder} has no file {split}*.jsonl or {split}*.parquet; give the file itself.")
    return [rows[row] for rows in map(read_rows, files) for row in range(len(rows))]
