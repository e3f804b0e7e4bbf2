"""`rlinf inspect placement`: the placement of a job's processes, with shared and idle hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.options import Assume, File, Live, Output, OutputOption, Overrides, Quiet, Verbose, assumed
from rlinf_cli.console import console
from rlinf_cli.console.outfile import write_whole

if TYPE_CHECKING:
    from rlinf_cli.placement.picture import Picture


def placement(
    file: File,
    overrides: Overrides = None,
    assume: Assume = None,
    live: Live = False,
    output: OutputOption = Output.TEXT,
    tree: Annotated[bool, typer.Option("--tree", help="Show groups, nodes and units.", show_default=False)] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every process; with --tree, every node.", show_default=False)
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Also write an SVG image; `-` prints it.", show_default=False),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show where each component runs, and which hardware is shared or idle.

    Connects to no machine: give accelerators that FILE does not declare with --assume, or probe the nodes with --live.
    KEY=VALUE replaces a value of FILE, ~KEY deletes one.
    """
    from rlinf_cli.file.job_file import load_sound
    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.placement.placement_picture import picture_of

    job = load_sound(file, overrides, assume, live=live)
    if svg is not None and any(svg.exists() and svg.samefile(name) for name in job.files):
        raise typer.BadParameter(f"`{svg}` is part of the configuration; name another file", param_hint="'--svg'")
    layout = lay_out(job, "placement", file, arguments=(*(overrides or ()), *assumed(assume)))
    picture = picture_of(Path(job.name).name, job.cluster, job.topology, layout.placements, layout.mode)
    if svg is not None and _draw(picture, svg):
        return
    if output is Output.JSON:
        from rlinf_cli.placement.placement_record import placement_record

        console.result_json(placement_record(job, layout))
    elif tree:
        from rlinf_cli.placement.placement_tree import tree_text

        console.result(tree_text(picture, every_node=show_all))
    else:
        from rlinf_cli.placement.placement_summary import processes_table, summary_text

        console.result(summary_text(job, layout, picture))
        if show_all:
            console.result(f"\n{processes_table(job, layout)}")


def _draw(picture: Picture, svg: Path) -> bool:
    """Write the image; return True if it went to standard output, which then holds nothing else."""
    from rlinf_cli.placement.placement_svg import placement_svg

    drawn = placement_svg(picture)
    if str(svg) == "-":
        console.result(drawn.rstrip("\n"))
        return True
    write_whole(svg, drawn)
    console.message(f"wrote {svg}")
    return False
