"""Model families whose turns and tool calls the package `renderers` knows, beyond what chat templates tell."""
