// Threads that stay: started once, at hand for every later call, asleep when there are none.
#pragma once

namespace clearhead {

// Calls work(data, 0) on this thread and work(data, 1), work(data, 2) … on up to `threads` − 1 others that have time, and returns
// when all who began have ended. Others may come late or not at all: `work` takes its tasks from a common list, and is whole
// when it returns to the one who called. It must not throw. Calls may come from many threads at once, and from inside `work`.
// A thread has the same number in one call after the other, where it can: what it used then is in its cache.
//
// `team` is how many threads PyTorch's own OpenMP has, or 0: then these are the threads, since after each operation of PyTorch's
// they wait for the next one without sleeping, on every core, and whoever else wants a core has to wait until they give up.
void together(int threads, int team, void (*work)(void*, int), void* data);

// To be called before the first fork.
void prepare_pool();

// OpenMP's `GOMP_parallel` and `omp_get_thread_num` as PyTorch's library has them.
void set_team(void* parallel, void* number);

}  // namespace clearhead
