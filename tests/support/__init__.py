"""Code that several test files share: rigs of engines and runs, generated answers, data sets, contracts of engines."""
