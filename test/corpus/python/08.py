class Matrix:
    """A small dense matrix of floats, stored row by row."""

    def __init__(self, rows):
        self.rows = [list(map(float, row)) for row in rows]
        widths = {len(row) for row in self.rows}
        if len(widths) != 1:
            raise ValueError("all rows must have the same length")

    @property
    def shape(self):
        return len(self.rows), len(self.rows[0])

    def __matmul__(self, other):
        if self.shape[1] != other.shape[0]:
            raise ValueError(f"shapes {self.shape} and {other.shape} do not fit")
        columns = list(zip(*other.rows))
        return Matrix([[sum(a * b for a, b in zip(row, column)) for column in columns] for row in self.rows])

    def __eq__(self, other):
        return isinstance(other, Matrix) and self.rows == other.rows

    def transpose(self):
        return Matrix(zip(*self.rows))

    def __repr__(self):
        lines = ("[" + ", ".join(f"{value:8.3f}" for value in row) + "]" for row in self.rows)
        return "\n".join(lines)
