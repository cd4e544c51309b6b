//! Device code. Every kernel works on `arena`, the words of one layer ([`Shape`](crate::Shape)), and
//! on lists of work items that the host prepares.

// `#[cube]` emits modules and functions without documentation. A condition that the host knows and one
// that the device finds out are two `if`s.
#![allow(missing_docs, unreachable_pub, clippy::too_many_arguments, clippy::collapsible_if)]

pub(crate) mod append;
pub(crate) mod attend;
pub(crate) mod combine;
pub(crate) mod copy;
pub(crate) mod dequantize;
pub(crate) mod number;
pub(crate) mod probe;
pub(crate) mod quantize_keys;
pub(crate) mod quantize_values;
pub(crate) mod quantizer;
pub mod splits;
