//! The parity suite: every backend against the reference on the same seeded cases.
//!
//! A [`Case`] is a configuration, some sequences with a prompt and generated tokens, and a kind of
//! data. The reference runs each sequence alone, the prompt in one step and then token by token;
//! the backend under test runs them as a [`Cut`] says: as a ragged batch, in chunks, several
//! generated tokens at once. Then
//!
//! - codes, scales, zeros, masks of promoted channels and full-precision tokens are equal bit by
//!   bit,
//! - every row's output agrees within [`tolerance`], derived from the arithmetic,
//! - the bytes the backend measures are those the memory model predicts.
//!
//! A case whose cache the backend does not support is skipped, printed and counted.
//!
//! So one comparison covers the kernels, and that results do not depend on how work was cut up.

mod case;
mod compare;
mod data;
mod run;

pub use case::{Case, Cut, Sequence, basic_cases, extended_cases};
pub use compare::{Report, check, tolerance};
pub use data::{DataKind, SequenceData};
pub use run::{RunResult, run};
