// Calls on PyTorch tensors of a kind that was seen before, known at a glance: where Python takes longer to look than the call takes.
#pragma once
#include <nanobind/nanobind.h>

#include "problem.h"

namespace clearhead {

// A call like an earlier one, on other arrays that lie alike; false while that one is still running, in another thread.
bool run_again(Call& call, void* q, void* k, void* v, void* out, int threads, int team, bool interruptible);

// One number for the variables and the cores that say how many threads there are: while it stays the same, so do they.
uint64_t surroundings();

// Functions by which Python meets PyTorch here, tells of threads, and has calls made.
void add_glance(nanobind::module_& m);

}  // namespace clearhead
