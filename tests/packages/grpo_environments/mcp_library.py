"""A small MCP server of the package `mcp`, over standard streams, for tests."""

try:
  from mcp.server.mcpserver import MCPServer as Server
except ImportError:  # mcp 1.
  from mcp.server.fastmcp import FastMCP as Server

server = Server("library")
BOOKS = {"Middlemarch": 1871, "Ulysses": 1922}


@server.tool()
def year_of(title: str) -> int:
  """Returns the year of a book.

  Args:
    title: Title of the book.
  """
  return BOOKS[title]


@server.tool()
def titles(before: int = 3000) -> list[str]:
  """Returns the titles of the library."""
  return [title for title, year in BOOKS.items() if year < before]


if __name__ == "__main__":
  server.run()
