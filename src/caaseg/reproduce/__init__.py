"""The paper's tables as data, the grid runner and its report."""
