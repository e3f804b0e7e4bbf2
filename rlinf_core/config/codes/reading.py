"""Codes of the stage `reading`: from the bytes of a file to a tree."""

from __future__ import annotations

from rlinf_core.config.codes.entry import Code, Example
from rlinf_core.config.diagnostics import Severity

_MINIMAL = "cluster:\n  num_nodes: 1\n"
_RIGHT = Example(_MINIMAL)


def _error(name: str, title: str, meaning: str, wrong: Example | str, right: Example | str = _RIGHT) -> Code:
    wrong = Example(wrong) if isinstance(wrong, str) else wrong
    right = Example(right) if isinstance(right, str) else right
    return Code(name, Severity.ERROR, title, meaning, wrong, right)


_FILES = (
    _error(
        "missing-file",
        "there is no file of that name",
        "The name is taken relative to the current directory. `-` reads standard input.",
        Example("(a name that no file has)", name="no-such-file.yaml"),
    ),
    _error(
        "is-directory",
        "the name is that of a directory",
        "A configuration is one file. Give the file's own name; a file can build on others with `extends`.",
        Example("(a directory)", name="."),
    ),
    _error(
        "unreadable-file",
        "the file is there but cannot be read",
        "The operating system refused to open or to read the file: you may lack the right to, its name may be too "
        "long, or the disk may fail. The message gives the system's reason.",
        Example("(a name longer than file systems allow)", name="a" * 5000 + ".yaml"),
    ),
    _error(
        "file-too-large",
        "the file is larger than any configuration",
        "A file of more than 8 MiB is not read: it is most likely the wrong file. Large tables belong into a file "
        "of their own whose path the configuration gives.",
        Example("(a file of more than 8 MiB)", data=b"#" * (8 * 1024 * 1024 + 1)),
    ),
    _error(
        "not-utf8",
        "the file is not UTF-8",
        "A configuration is UTF-8 text. A file in UTF-16 (as some editors for Windows save it) or in a national "
        "code page must be saved anew as UTF-8. The finding is at the first byte that is none.",
        Example("(a file saved in Latin-1)", data="cluster:\n  num_nodes: 1  # für\n".encode("latin-1")),
        Example(_MINIMAL.rstrip() + "  # für\n"),
    ),
    _error(
        "control-character",
        "the file holds a character that text does not",
        "Control characters other than tabs and line ends are not allowed in YAML; a NUL means that the file is no "
        "text at all. Where a value needs one, write it as an escape within double quotes.",
        'prompt: "«\x1b»[1m"\n' + _MINIMAL,
        'prompt: "\\x1b[1m"\n' + _MINIMAL,
    ),
    _error(
        "empty-file",
        "the file has no content",
        "Nothing but blanks, comments and document marks was found. The smallest configuration names the cluster.",
        "# to be written\n",
    ),
    _error(
        "not-a-mapping",
        "the top level is not a mapping",
        "A configuration is a mapping of sections, `key: value`. A list or a single value at the top is something "
        "else; a forgotten blank after a colon makes a single value of a whole file.",
        "«cluster:1»\n",
        _MINIMAL,
    ),
)

_SYNTAX = (
    _error(
        "yaml-syntax",
        "the file is not YAML",
        "The reader stops at the first place that is not YAML, so this is reported alone. Usual causes: a second "
        "colon on a line, an unquoted value that starts with one of `%` `@` `*` `&` or a backtick, a quote or "
        "bracket that is not closed, text after a closing quote, an indentation that fits no line above, a template"
        " `{{ ... }}` without quotes.",
        "cluster:\n  num_nodes: 1\nrunner: name«:» demo\n",
        "cluster:\n  num_nodes: 1\nrunner: 'name: demo'\n",
    ),
    _error(
        "lone-surrogate",
        "an escape stands for half a character",
        "In double quotes, `\\ud83d\\ude00` is one character in two halves, the way JSON writes it. One half alone "
        "is no character. Write the character itself.",
        'cluster:\n  num_nodes: 1\nprompt: «"\\ud83d"»\n',
        'cluster:\n  num_nodes: 1\nprompt: "\\ud83d\\ude00"\n',
    ),
    _error(
        "tab-indentation",
        "a line is indented with a tab",
        "YAML indents with spaces, because the width of a tab differs between editors. Tabs elsewhere, before a "
        "comment say, are fine. A file whose every line starts with the same tab is read with the warning "
        "`indented-file`.",
        "cluster:\n«\t»num_nodes: 1\n",
        _MINIMAL,
    ),
    Code(
        "indented-file",
        Severity.WARNING,
        "every line starts with the same blanks",
        "The file looks pasted from a document. The blanks or the tab that all lines share are ignored; positions "
        "are still those in the file as it is. Take them off, for other tools may not be as lenient.",
        Example("«\t»cluster:\n\t  num_nodes: 1\n"),
        _RIGHT,
    ),
    _error(
        "several-documents",
        "the file holds more than one document",
        "A line `---` after some content starts a second YAML document, and `...` ends the first. A configuration "
        "is one document; only the first is checked. To build on another file, use `extends`.",
        "cluster:\n  num_nodes: 1\n«---»\ncluster:\n  num_nodes: 2\n",
        "---\ncluster:\n  num_nodes: 1\n",
    ),
    _error(
        "yaml-version",
        "the file asks for another version of YAML",
        "Files are read as YAML 1.2, where `on`, `yes` and `1:20` are text and `010` is ten. A `%YAML 1.1` line "
        "asks for the older rules, which give other values, so it is refused rather than ignored.",
        "«%YAML 1.1»\n---\ncluster:\n  num_nodes: 1\n",
        "%YAML 1.2\n---\ncluster:\n  num_nodes: 1\n",
    ),
)

_KEYS = (
    _error(
        "duplicate-key",
        "a key appears twice in one mapping",
        "Many readers silently keep the last one, and half of a section is lost. Keys are compared by their text, so "
        '`4090` and `"4090"` are the same. Checking goes on with the first.',
        "cluster:\n  num_nodes: 1\n  «num_nodes»: 2\n",
        _MINIMAL,
    ),
    _error(
        "null-key",
        "a key is missing or null",
        "A line that starts with `:`, or a key written `~` or `null`, names nothing. Write the name, in quotes if "
        "it is meant to be that very word.",
        "cluster:\n  num_nodes: 1\n«null»: 2\n",
        "cluster:\n  num_nodes: 1\n",
    ),
    _error(
        "complex-key",
        "a mapping or list stands where a key belongs",
        "YAML allows any value as a key; a configuration has names and numbers only. Mostly this is a template `{{ "
        "name }}` that was not quoted, which YAML reads as a mapping within a mapping.",
        "cluster:\n  num_nodes: 1\nrunner: {«{ name }»}\n",
        'cluster:\n  num_nodes: 1\nrunner: "{{ name }}"\n',
    ),
    _error(
        "bad-merge",
        "`<<` is given something that is not a mapping",
        "`<<: *name` puts the keys of the mapping `&name` into this one, where keys written here win. A list of "
        "mappings is taken too; the first that has a key wins.",
        "cluster:\n  num_nodes: 1\n  <<: «3»\n",
        "cluster:\n  <<: {num_nodes: 1}\n",
    ),
)

_ALIASES = (
    _error(
        "undefined-alias",
        "an alias names no anchor",
        "`*name` repeats a value marked `&name` further up in the same file. Quote a value that is meant to start "
        "with an asterisk.",
        "cluster:\n  num_nodes: «*nodes»\n",
        "runner: &nodes 1\ncluster:\n  num_nodes: *nodes\n",
    ),
    _error(
        "recursive-alias",
        "an alias stands inside the value it names",
        "Such a value would contain itself without end.",
        "runner: &loop [1, «*loop»]\ncluster:\n  num_nodes: 1\n",
        "runner: &once [1]\ncluster:\n  num_nodes: 1\n",
    ),
    _error(
        "too-many-nodes",
        "there are more values than any configuration has",
        "At most 500,000 values are read, counted after every alias has been replaced by what it stands for: a few "
        "lines of aliases that repeat each other can stand for billions.",
        Example(
            "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"{n}: &{n} [{', '.join([f'*{p}'] * 10)}]\n" for p, n in ("ab", "bc", "cd", "de"))
            + f"f: [*e, *e, *e, «*e», {', '.join(['*e'] * 6)}]\n"
        ),
    ),
    _error(
        "too-deep",
        "mappings and lists are nested too deep",
        "At most 100 levels are read. No configuration comes near; a generator has probably run wild.",
        "runner: " + "[" * 99 + "«[»" + "]" * 100 + "\ncluster:\n  num_nodes: 1\n",
        "runner: [[]]\ncluster:\n  num_nodes: 1\n",
    ),
)

_TAGS = (
    _error(
        "unknown-tag",
        "a value carries a tag that is not known",
        "Only plain data is read, and nothing is ever built from a tag. `!!str`, `!!int`, `!!float`, `!!bool`, "
        "`!!null`, `!!map` and `!!seq` are known. For a variable of the environment write `${env:NAME}`.",
        "cluster:\n  num_nodes: «!env» NODES\n",
        "cluster:\n  num_nodes: !!int 1\n",
    ),
    _error(
        "tag-mismatch",
        "a tag does not fit its value",
        "A tag such as `!!int` says what a value is, and this value is something else. Tags are hardly ever needed:"
        " quotes make text, and numbers are numbers.",
        "cluster:\n  num_nodes: «!!int» one\n",
        "cluster:\n  num_nodes: !!int 1\n",
    ),
)

CODES: tuple[Code, ...] = _FILES + _SYNTAX + _KEYS + _ALIASES + _TAGS
