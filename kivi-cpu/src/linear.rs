//! Dense layers: `y[r, o] = Σ_i x[r, i]·w[o, i] (+ bias[o])`.
//!
//! *Float* weights ([`float`]) stay views of the mapped file, are converted to f32 as they are read
//! and accumulated in f32. *Quantized* weights are rearranged when they are loaded ([`panels`]),
//! without rounding anything, and multiplied as integers ([`quantized`]): each activation row is first
//! rounded to 8 bits in blocks of 32 with a scale each ([`activations`]), once for all weights it
//! meets. A single row is bound by reading the weights, so they are read once, in order, at the size
//! they have in the file.
//!
//! A row's result is bit-identical for any number of rows and threads: the order in which a row's
//! products are added depends on the number of columns alone. It differs between instruction sets
//! in the rounding of `a·b + c` only.

mod activations;
mod float;
mod panels;
mod product;
mod quantized;
mod rectangle;
mod weight;
mod work;

pub(crate) use product::{Activations, GatedProduct, Product, run_all};
pub(crate) use rectangle::Rectangle;
pub use weight::Weight;
