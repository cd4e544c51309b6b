//! Device code.

pub mod splits;
