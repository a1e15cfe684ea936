"""Figures of the report of a grid: mean scores, and differences per class."""

from matplotlib.figure import Figure

from caaseg.reports.figures import COLORS, MARKERS
from caaseg.reproduce.report import GridReport
from caaseg.reproduce.report_text import plural


def draw_grid(report: GridReport) -> Figure:
    """Draw means with standard deviations next to the paper's, on one scale if both are on the same data.

    The protocols of a row are drawn below each other.
    """
    has_paper = any(row.paper is not None for row in report.rows)
    labels = {row.row: row.label for row in report.rows}
    figure = Figure(figsize=(11 if has_paper else 8, 1.6 + 0.28 * len(report.rows)), layout="constrained")
    panels = figure.subplots(1, 1 + has_paper, sharey=True, sharex=report.same_data, squeeze=False)[0]
    colors = {protocol: COLORS[k % len(COLORS)] for k, protocol in enumerate(report.protocols)}
    for row in report.rows:
        color = colors[row.protocol]
        offset = report.protocols.index(row.protocol) - (len(report.protocols) - 1) / 2
        y = list(labels).index(row.row) + 0.4 * offset / len(report.protocols)
        if row.mean is not None:
            bar = None if row.std is None else 100 * row.std
            panels[0].errorbar(100 * row.mean, y, xerr=bar, color=color, marker="o", capsize=3)
            panels[0].plot(
                [100 * score for score in row.finished], [y] * len(row.finished), "|", color=color, alpha=0.6
            )
        if row.paper is not None:
            panels[1].errorbar(row.paper, y, xerr=row.paper_std, color=color, marker="D", capsize=3)
    panels[0].set_yticks(range(len(labels)), list(labels.values()), fontsize=9)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    theirs = report.publisher if report.same_data else f"{report.publisher}, other data"
    for panel, title in zip(panels, ("ours", theirs), strict=False):
        panel.set_title(title if has_paper else "", fontsize=10)
        panel.set_xlabel("mean IoU, %")
        panel.grid(alpha=0.25, axis="x")
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right"]].set_visible(False)
    if len(colors) > 1:
        handles = [
            panels[0].plot([], [], color=color, linewidth=3, label=protocol)[0] for protocol, color in colors.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(colors), frameon=False, fontsize=9)
    figure.suptitle(report.title, fontsize=11)
    return figure


def draw_classes(report: GridReport) -> Figure:
    """Draw the differences of IoU per class to the baseline, one panel per row.

    Filled markers are shown differences. Intervals much wider than the differences extend beyond the panel.
    """
    names = report.class_names
    labels = {row.row: f"{row.label}\nagainst {row.baseline}" for row in report.rows if row.classes}
    columns = min(4, len(labels))
    lines = -(-len(labels) // columns)
    size = (2.2 + 2.7 * columns, 1.2 + lines * (0.7 + 0.26 * len(names)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    panels = dict(zip(labels, axes.flat, strict=False))
    largest = max(abs(difference.mean) for row in report.rows for difference in row.classes.values())
    limit = max(300 * largest, 0.1)
    colors = {protocol: COLORS[k % len(COLORS)] for k, protocol in enumerate(report.protocols)}
    markers = {protocol: MARKERS[k % len(MARKERS)] for k, protocol in enumerate(report.protocols)}
    for row in (row for row in report.rows if row.classes):
        color, panel = colors[row.protocol], panels[row.row]
        offset = report.protocols.index(row.protocol) - (len(report.protocols) - 1) / 2
        for name, difference in row.classes.items():
            y = names.index(name) + 0.5 * offset / len(report.protocols)
            if difference.low is not None and difference.high is not None:
                panel.plot([100 * difference.low, 100 * difference.high], [y, y], color=color, linewidth=1.2, alpha=0.6)
            face = "white" if difference.claim == "no difference shown" else color
            marker = markers[row.protocol]
            panel.plot(100 * difference.mean, y, marker, color=color, markerfacecolor=face, markersize=5)
    for panel in axes.flat[len(labels) :]:
        panel.set_visible(False)
    for name, panel in panels.items():
        panel.set_title(labels[name], fontsize=9)
        panel.set_xlabel("difference of IoU, points", fontsize=8)
        panel.axvline(0, color="#555555", linewidth=0.8)
        panel.set_xlim(-limit, limit)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.grid(alpha=0.25, axis="x")
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", labelsize=8, labelbottom=True)
        panel.spines[["top", "right"]].set_visible(False)
    blank = axes.flat[0]
    handles = [
        blank.plot([], [], color=color, marker=markers[name], markerfacecolor="white", label=name)[0]
        for name, color in colors.items()
    ]
    handles.append(blank.plot([], [], "o", color="#555555", label="filled: difference shown")[0])
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    corrected = f"intervals corrected for {plural(report.class_comparisons, 'comparison')}"
    figure.suptitle(f"{report.title}: differences per class, {corrected}", fontsize=10)
    return figure
