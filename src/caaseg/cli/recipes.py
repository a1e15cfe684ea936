"""`caaseg recipes`: list, show and copy recipes."""

from pathlib import Path
from typing import Literal

from caaseg.cli.terminal import printable
from caaseg.errors import CaasegError


def recipes(action: Literal["list", "show", "copy"] = "list", name: str | None = None, file: Path | None = None) -> int:
    """List the recipes, show one (caaseg recipes show NAME) or copy one (caaseg recipes copy NAME FILE).

    Shown and copied recipes are complete: they contain every value. Rows of the paper's tables are recipes too.

    Args:
        action: list, show or copy.
        name: the recipe or table row to show or copy, such as camvid/caa_resnet18 or table1/caa_gate3x128.
        file: the new YAML file to copy to.
    """
    from caaseg.files import atomic_write
    from caaseg.recipes import SHIPPED, load_recipe, recipe_names, recipe_text
    from caaseg.reproduce.tables import TABLES

    rows = {f"{table}/{row.name}": row for table, content in TABLES.items() for row in content.rows if row.dataset}
    if action == "list":
        for shipped in recipe_names():
            print(f"{shipped:52} {(SHIPPED / f'{shipped}.yaml').read_text().partition(chr(10))[0].lstrip('# ')}")
        for row_name, row in rows.items():
            print(f"{row_name:52} {row.title(own_recipe=True)}")
        return 0
    if name is None:
        raise CaasegError(f"caaseg recipes {action} needs NAME; caaseg recipes lists all names")
    note = rows[name].note if name in rows else None
    text = f"# {name}\n{f'# {note}{chr(10)}' if note else ''}{recipe_text(load_recipe(name))}"
    if action == "show":
        print(text, end="")
        return 0
    if file is None:
        raise CaasegError("caaseg recipes copy needs NAME and FILE, the new YAML file")
    if file.exists():
        raise CaasegError(f"{file}: exists already; give the name of a new file")
    with atomic_write(file) as temporary:
        temporary.write_text(text)
    print(f"recipe: {printable(str(file))}")
    return 0
