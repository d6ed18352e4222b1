"""Where rows come from: parquet and JSONL files, and tasks.

A row of a file is accepted as verl writes it: ``prompt`` (a text or chat messages), the answer in ``answer`` or in
``reward_model.ground_truth``, and any other columns, which reward functions get by name (``data_source``,
``extra_info``, ...). A ``response`` column makes a row a demonstration for the warm-up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hybridflow.config.schema import DataConfig
from hybridflow.data.tasks import Row, asked, load_task
from hybridflow.errors import ConfigError
from hybridflow.seeds import derive_seed

_SUFFIXES = (".parquet", ".jsonl")
_USUAL_PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input", "messages", "text")
DEFAULT_TASK = "sort"


def names_of(source: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """A source as a tuple of file names and task names; None is the built-in task."""
    return (source,) if isinstance(source, str) else tuple(source or (DEFAULT_TASK,))


def is_file(name: str) -> bool:
    """Whether a name means a file (else it means a task). ``my_task.py:MyTask`` is a task."""
    return ":" not in name and (Path(name).suffix != "" or "/" in name)


def unreadable(name: str) -> ConfigError | None:
    """What is wrong with the name of a file, as far as can be seen without opening it; None if nothing is."""
    path = Path(name).expanduser()
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES]
        hint = f"name the files in it: {path / files[0].name}" if files else "name a .parquet or .jsonl file"
        return ConfigError(f"{name!r} is a folder", hint=hint)
    if path.suffix not in _SUFFIXES:
        return ConfigError(
            f"{name!r} is no file that can be read: its name must end in {' or '.join(_SUFFIXES)}",
            hint="write one JSON object a line (.jsonl), or a parquet file; a task of your own is my_task.py:MyTask",
        )
    if not path.is_file():
        beside = [entry.name for entry in path.parent.glob("*")] if path.parent.is_dir() else []
        near = get_close_matches(path.name, beside, n=1)
        hint = f"did you mean {path.with_name(near[0])}?" if near else f"looked in {path.parent.resolve()}"
        return ConfigError(f"there is no file {name!r}", hint=hint)
    return None


def check_source(source: str | tuple[str, ...] | None, config: DataConfig, key: str = "data.train") -> None:
    """Quick check before anything starts: files can be opened and their first row has a prompt; ``key`` named them.

    Raises:
        ConfigError: the first problem, with the cure.
    """
    try:
        for name in names_of(source):
            if not is_file(name):
                load_task(name)
            elif next(_file_rows(name, config), None) is None:
                raise ConfigError("the file has no rows", hint="was it written to its end?", where=name)
    except ConfigError as error:
        error.where = error.where or key
        raise


def read_rows(
    source: str | tuple[str, ...] | None, config: DataConfig, *, seed: int, split: str, count: int | None = None
) -> list[Row]:
    """All rows of a source; of a task ``count`` of them (None: the task's size). Empty prompts are among them.

    Rows that a task made carry its name as ``extra["task"]``: it says which verifier scores them.

    Raises:
        ConfigError: a file that is missing or unreadable, a missing prompt column, or an unknown task.
    """
    rows: list[Row] = []
    for name in names_of(source):
        if is_file(name):
            rows.extend(_file_rows(name, config))
        else:
            task = load_task(name)
            size = task.size if count is None else count
            made = asked(name, task.prompts, size, derive_seed(seed, "prompts", split), split)
            rows.extend(_of_task(name, made))
    return rows


def read_demonstrations(
    source: str | tuple[str, ...] | None, config: DataConfig, *, seed: int, count: int
) -> list[Row]:
    """Rows with a ``response``: all of a file's, or ``count`` that a task makes.

    Raises:
        ConfigError: as ``read_rows``; or the source has no demonstrations.
    """
    rows: list[Row] = []
    for name in names_of(source):
        if is_file(name):
            found = [row for row in _file_rows(name, config) if row.response]
            if not found:
                raise ConfigError(
                    f"{name} has no column 'response' with text in it: there is nothing to warm up on",
                    hint="turn the warm-up off (warmup.steps=0), or name a JSONL of prompt and response in warmup.data",
                    where="warmup.data",
                )
            rows.extend(found)
        else:
            task = load_task(name)
            rows.extend(_of_task(name, asked(name, task.demonstrations, count, derive_seed(seed, "demonstrations"))))
    return rows


def _of_task(name: str, rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        if not isinstance(row, Row):
            hint = "import it: from hybridflow.data.tasks import Row"
            raise ConfigError(f"task {name} made a {type(row).__name__}, not a Row", hint=hint)
        yield row._replace(extra={**row.extra, "task": name})


def _file_rows(name: str, config: DataConfig) -> Iterator[Row]:
    for place, record in _records(name):
        if config.prompt_key not in record:
            _require_prompt_column(place, record, config.prompt_key)
        extra = dict(record)
        prompt, response = extra.pop(config.prompt_key), extra.pop("response", None)
        _require_prompt(place, prompt, config.prompt_key)
        answer = extra.pop(config.answer_key, None)
        reward_model = record.get("reward_model")
        if answer is None and isinstance(reward_model, Mapping):
            answer = reward_model.get("ground_truth")
        yield Row(prompt, answer, extra, response)


def _records(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, record) of each row of a file."""
    if error := unreadable(name):
        raise error
    path = Path(name).expanduser()
    return _parquet_records(path) if path.suffix == ".parquet" else _json_records(path)


def _json_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"a JSON object is needed, not {type(record).__name__}")
                yield f"{path}:{number}", record
    except (OSError, ValueError) as error:
        where = f"{path}:{number}" if number else str(path)
        raise ConfigError(f"cannot be read: {error}", hint="write one JSON object a line", where=where) from error


def _parquet_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow.parquet as pq  # a tenth of a second, and most runs do not need it

    try:
        row = 0
        with pq.ParquetFile(path) as file:
            for part in file.iter_batches():
                for record in part.to_pylist():
                    row += 1
                    yield f"{path} row {row}", record
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise ConfigError(
            f"cannot be read: {error}", hint="is it a parquet file, and complete?", where=str(path)
        ) from error


def _require_prompt(place: str, prompt: Any, key: str) -> None:
    """A prompt is a text, or chat messages; an empty one is counted later."""
    chat = isinstance(prompt, list) and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt)
    if prompt is not None and not isinstance(prompt, str) and not chat:
        raise ConfigError(
            f"column {key!r} holds {type(prompt).__name__} {prompt!r:.80}, which is no prompt",
            hint="a prompt is a text, or a list of chat messages, each with role and content",
            where=place,
        )


def _require_prompt_column(place: str, record: Mapping[str, Any], key: str) -> None:
    if key in record:
        return
    near = [name for name in _USUAL_PROMPT_COLUMNS if name in record] or get_close_matches(key, record, n=1)
    raise ConfigError(
        f"there is no column {key!r}; the columns are: {', '.join(record) or 'none'}",
        hint=f"set data.prompt_key={near[0]}" if near else "name the prompts' column in data.prompt_key",
        where=place,
    )
