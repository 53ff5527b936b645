"""From a question to its answer: prompt, plan, engine, text."""
