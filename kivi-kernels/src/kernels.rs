//! Device code.

pub mod matrix;
