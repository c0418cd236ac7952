"""An MCP server written with the package `mcp`."""

import os
import sys
import time

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
stock = {"apple": 3}


@server.tool()
def buy(name: str, count: int = 1) -> str:
    """Buy something."""
    if name not in stock:
        raise ToolError(f"no {name} here")
    stock[name] -= count
    return f"{stock[name]} left"


@server.tool()
def go_wrong(how: str) -> str:
    """Go wrong."""
    print("these are my last words", file=sys.stderr, flush=True)
    if how == "exit":
        os._exit(3)
    if how == "crash":
        os.kill(os.getpid(), 11)
    if how == "hang":
        time.sleep(1000)
    if how == "garbage":
        os.write(1, b"Welcome!\n")
    if how == "refuse":
        raise MCPError(code=-32602, message="not on Sundays")
    if how == "large":
        return "x" * (9 << 20)
    return "fine"


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        import uvicorn

        uvicorn.run(server.streamable_http_app(), fd=int(sys.argv[2]))
    elif sys.argv[1:2] == ["broken"]:
        sys.exit("the shop is closed on Sundays")
    else:
        print("seed", sys.argv[1], file=sys.stderr, flush=True)
        server.run()
