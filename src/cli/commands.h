// The subcommands of `kindred`. Each takes the arguments behind its name and returns the exit status:
// 0 done, 1 failed, 2 wrong usage.
#pragma once

#include <span>

namespace kindred::cli {

using Args = std::span<const char* const>;

int run_worker(Args args);
int run_router(Args args);
int run_picker(Args args);
int run_demo(Args args);
int run_record(Args args);
int run_fit(Args args);
int run_place(Args args);
int run_status(Args args);
int run_model(Args args);
int run_bench(Args args);
int run_reproduce(Args args);
int run_simulate(Args args);

// Of `kindred simulate`.
int run_simulate_profile(Args args);
int run_simulate_serve(Args args);  // with --serve
int run_simulate_calibrate(Args args);
int run_simulate_advise(Args args);

}  // namespace kindred::cli
