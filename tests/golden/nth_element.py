"""The order in which the recorded DFlash2 runs met their candidates: that of C++'s `nth_element`.

PyTorch's unsorted `topk` on a CPU leaves its k largest where libstdc++'s introselect puts them, and
a draw by running sums depends on that order.
"""


def unsorted_top_k(values, k):
    """Indices of the k largest of a list, in the order in which `torch.topk` leaves them.

    For k * 64 > len(values); smaller k take another way.
    """
    assert k * 64 > len(values)
    queue = [(float(value), index) for index, value in enumerate(values)]
    _introselect(queue, k - 1)
    return [index for _, index in queue[:k]]


def _introselect(queue, nth):
    """Put the entry of rank `nth`, largest first, in its place; larger ones come before it."""
    first, last = 0, len(queue)
    while last - first > 3:
        cut = _partition(queue, first, last)
        first, last = (cut, last) if cut <= nth else (first, cut)
    for i in range(first + 1, last):  # insertion sort
        entry, j = queue[i], i
        while j > first and entry[0] > queue[j - 1][0]:
            queue[j] = queue[j - 1]
            j -= 1
        queue[j] = entry


def _partition(queue, first, last):
    """Partition queue[first + 1 : last] by the median of three, which comes first."""
    middle = first + (last - first) // 2
    three = sorted((first + 1, middle, last - 1), key=lambda i: queue[i][0])
    queue[first], queue[three[1]] = queue[three[1]], queue[first]
    pivot, i, j = queue[first][0], first + 1, last
    while True:
        while queue[i][0] > pivot:
            i += 1
        j -= 1
        while pivot > queue[j][0]:
            j -= 1
        if i >= j:
            return i
        queue[i], queue[j] = queue[j], queue[i]
        i += 1
