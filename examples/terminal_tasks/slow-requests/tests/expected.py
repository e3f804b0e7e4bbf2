"""Print the paths that the task asks for, from the numbers that made the log."""

state, slow = 12345, set()
for _ in range(400):
    state = (state * 1103515245 + 12345) % 2**31
    if (200, 200, 500)[state // 64 % 3] == 200 and state // 1024 % 520 > 500:
        slow.add(f"/{'abcdefgh'[state // 7 % 8]}")
print("\n".join(sorted(slow)))
