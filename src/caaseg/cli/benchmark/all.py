"""`caaseg benchmark all`: every speed and memory number of the project."""

from pathlib import Path

from caaseg.cli.arguments import Names, check_directory, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.errors import CaasegError


def benchmark_all(
    *,
    out: Path,
    camvid: Path | None = None,
    parts: Names | None = None,
    quick: bool = False,
) -> int:
    """Measure all speed and memory numbers of the project, one file per part, and compare them with their goals.

    A part that has finished is not repeated for the same commit and device: repeat the command to continue. A part that
    fails is named at the end, and the exit code is 1.

    Args:
        out: directory for the numbers, figures and logs.
        camvid: directory of CamVid, for the parts evaluation, train_camvid, loader and cpu.
        parts: names of parts; none runs all.
        quick: run all parts at tiny sizes on a CPU, to try them.
    """
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from caaseg.benchmarks import all as benchmark
    from caaseg.benchmarks.loader import write_scenes
    from caaseg.benchmarks.provenance import provenance

    check_directory(out, "--out")
    known = {part.name: part for part in benchmark.PARTS}
    for name in parts or ():
        if name not in known:
            raise CaasegError(f"--parts has {name!r}; expected any of {', '.join(known)}")
    chosen = [part for part in benchmark.PARTS if parts is None or part.name in parts]
    device = device_of("cpu" if quick else "auto")
    if not quick:
        on_gpu = [part.name for part in chosen if part.device == "cuda"]
        if on_gpu and device.type != "cuda":
            raise CaasegError(
                f"the parts {', '.join(on_gpu)} need an NVIDIA GPU, but torch sees none; run them on a machine with "
                "a GPU, choose others with --parts, or try them at tiny sizes with --quick"
            )
        with_data = [part.name for part in chosen if part.needs_camvid]
        if with_data and camvid is None:
            raise CaasegError(f"the parts {', '.join(with_data)} need --camvid, the directory of CamVid")
        if with_data and camvid is not None and not camvid.is_dir():
            raise CaasegError(f"--camvid is '{camvid}': no such directory; expected the directory of CamVid")
    console = console_for(None)
    origin = provenance(device, COMMAND_LINE)
    hardware = f"{origin['hardware']['device']}, {origin['hardware']['processor']}"
    estimate = " and ".join(
        f"{sum(part.seconds for part in chosen if part.device == kind) / 60:.1f} minutes on the {title}"
        for kind, title in (("cuda", "GPU"), ("cpu", "CPU"))
    )
    planned = "at tiny sizes" if quick else f"about {estimate}"
    console.print(f"{len(chosen)} parts, {planned}; commit {origin['commit']}", soft_wrap=True)
    if not quick:
        console.print(", ".join(f"{part.name} {part.seconds} s" for part in chosen), soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    results = {
        one.name: one for one in benchmark.read_index(out) if (one.commit, one.device) == (origin["commit"], hardware)
    }
    with ExitStack() as stack:
        if quick and camvid is None:
            camvid = Path(stack.enter_context(TemporaryDirectory()))
            write_scenes(camvid, 8)  # as many as the calibration of INT8 models needs
            write_scenes(camvid, 2, "val")
        for result, is_before in benchmark.run_parts(
            chosen, out, commit=origin["commit"], device=hardware, camvid=camvid, quick=quick, run=benchmark.run_command
        ):
            results[result.name] = result
            state = f"failed with exit code {result.exit_code}" if result.exit_code else "finished"
            took = f"{state} {'before' if is_before else f'in {result.seconds:.0f} s'}"
            console.print(f"{result.name}: {took} (estimate {result.estimate_s} s)", soft_wrap=True)
            goals = benchmark.goals(out, [one.name for one in results.values() if one.exit_code == 0])
            content = {
                **origin,
                "parts": [one._asdict() for one in results.values()],
                "goals": [{**goal._asdict(), "is_met": goal.is_met} for goal in goals],
            }
            write_json(content, str(out / benchmark.INDEX))
    for goal in goals:
        if goal.value is not None and not quick:
            bound = f"at least {goal.at_least:g}" if goal.at_most is None else f"at most {goal.at_most:g}"
            console.print(f"{goal.name}: {goal.value:.3g}, goal {bound}, {'met' if goal.is_met else 'missed'}")
    failed = [part.name for part in chosen if results[part.name].exit_code]
    if failed:
        logs = ", ".join(str(out / f"{name}.log") for name in failed)
        console.print(f"failed: {', '.join(failed)}; see {logs}", style="bold red", soft_wrap=True)
    return 1 if failed else 0
