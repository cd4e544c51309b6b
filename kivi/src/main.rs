//! The `kivi` program.

mod cli;

use std::process::ExitCode;

/// Gives memory back to the system when it is freed: with the system's allocator, what a long prompt
/// needed for a moment stays resident, and the smaller cache cannot be seen from outside.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::main()
}
