//! Instructions that only compute.

use half::f16;

/// What an operand's bits mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Bits(u32),
    Unsigned(u32),
    Signed(u32),
    Half,
    Halves,
    Float,
    Double,
    Predicate,
}

impl Type {
    fn parse(name: &str) -> Option<Self> {
        let bits = || name.get(1..)?.parse().ok();
        Some(match name {
            "f16" => Self::Half,
            "f16x2" => Self::Halves,
            "f32" => Self::Float,
            "f64" => Self::Double,
            "pred" => Self::Predicate,
            _ if name.starts_with('b') => Self::Bits(bits()?),
            _ if name.starts_with('u') => Self::Unsigned(bits()?),
            _ if name.starts_with('s') => Self::Signed(bits()?),
            _ => return None,
        })
    }

    fn bits(self) -> u32 {
        match self {
            Self::Bits(bits) | Self::Unsigned(bits) | Self::Signed(bits) => bits,
            Self::Half => 16,
            Self::Halves | Self::Float => 32,
            Self::Double => 64,
            Self::Predicate => 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compare {
    Equal,
    Unequal,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

/// Operations; those with the same name are told apart by the type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Copy,
    And,
    Or,
    Xor,
    Not,
    CountOnes,
    ShiftLeft,
    ShiftRight,
    Add,
    Subtract,
    Multiply,
    MultiplyWide,
    MultiplyHigh,
    MultiplyAdd,
    MultiplyAddWide,
    MultiplyAddDown,
    Saturate,
    Divide,
    Remainder,
    Minimum,
    Maximum,
    Negate,
    Absolute,
    Exp2,
    Log2,
    Reciprocal,
    SquareRoot,
    Tanh,
    Compare(Compare),
    /// The opposite of a comparison that is false for NaN.
    Unless(Compare),
    Select,
    Convert(Type),
    Permute,
    Insert,
    Extract,
}

/// An operation and its type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Compute {
    kind: Kind,
    ty: Type,
}

impl Compute {
    /// From a mnemonic's parts: `["mul", "wide", "u32"]`.
    pub(super) fn parse(parts: &[&str]) -> Option<Self> {
        let ty = Type::parse(parts.last()?)?;
        let has = |part: &str| parts.contains(&part);
        let kind = match parts[0] {
            "mov" | "cvta" => Kind::Copy,
            "and" => Kind::And,
            "or" => Kind::Or,
            "xor" => Kind::Xor,
            "not" => Kind::Not,
            "popc" => Kind::CountOnes,
            "shl" => Kind::ShiftLeft,
            "shr" => Kind::ShiftRight,
            "add" => Kind::Add,
            "sub" => Kind::Subtract,
            "mul" if has("wide") => Kind::MultiplyWide,
            "mul" if has("hi") => Kind::MultiplyHigh,
            "mul" => Kind::Multiply,
            "mad" if has("wide") => Kind::MultiplyAddWide,
            "mad" if has("lo") => Kind::MultiplyAdd,
            // Of directed roundings only what `expf` takes is known.
            _ if parts[0] != "cvt" && (has("rp") || has("rz")) => return None,
            "fma" if has("rm") && ty == Type::Float => Kind::MultiplyAddDown,
            _ if parts[0] != "cvt" && has("rm") => return None,
            "fma" => Kind::MultiplyAdd,
            "div" => Kind::Divide,
            "rem" => Kind::Remainder,
            "min" => Kind::Minimum,
            "max" => Kind::Maximum,
            "neg" => Kind::Negate,
            "abs" => Kind::Absolute,
            "ex2" => Kind::Exp2,
            "lg2" => Kind::Log2,
            "rcp" => Kind::Reciprocal,
            "sqrt" => Kind::SquareRoot,
            "tanh" => Kind::Tanh,
            "selp" => Kind::Select,
            "prmt" if parts.len() == 2 => Kind::Permute,
            "bfi" => Kind::Insert,
            "bfe" => Kind::Extract,
            "setp" if parts.len() == 3 && parts[2] == "f32" && parts[1].ends_with('u') => {
                // True if either is NaN.
                Kind::Unless(match parts[1] {
                    "equ" => Compare::Unequal,
                    "neu" => Compare::Equal,
                    "ltu" => Compare::GreaterEqual,
                    "leu" => Compare::Greater,
                    "gtu" => Compare::LessEqual,
                    "geu" => Compare::Less,
                    _ => return None,
                })
            }
            "setp" if parts.len() == 3 => Kind::Compare(match parts[1] {
                "eq" => Compare::Equal,
                "ne" => Compare::Unequal,
                "lt" | "lo" => Compare::Less,
                "le" | "ls" => Compare::LessEqual,
                "gt" | "hi" => Compare::Greater,
                "ge" | "hs" => Compare::GreaterEqual,
                _ => return None,
            }),
            // Rounding: only to nearest, and towards zero for integers, are known.
            "cvt" if parts == ["cvt", "sat", "f32", "f32"] => Kind::Saturate,
            "cvt" if has("rm") || has("rp") || has("sat") => return None,
            "cvt" => Kind::Convert(Type::parse(parts[parts.len() - 2])?),
            _ => return None,
        };
        Some(Self { kind, ty })
    }

    /// Bits of each of `parts` results.
    pub(super) fn result_bits(self, parts: usize) -> u32 {
        let bits = match self.kind {
            Kind::Compare(_) | Kind::Unless(_) => 1,
            Kind::Convert(to) => to.bits(),
            Kind::MultiplyWide | Kind::MultiplyAddWide => 2 * self.ty.bits(),
            _ => self.ty.bits(),
        };
        bits / parts.max(1) as u32
    }
}

/// `width` bits of `value` from bit `from` on.
pub(super) fn field(value: u64, from: u32, width: u32) -> u64 {
    let value = value.checked_shr(from).unwrap_or(0);
    if width >= 64 { value } else { value & ((1 << width) - 1) }
}

fn signed(value: u64, bits: u32) -> i64 {
    let unused = 64 - bits;
    ((value << unused) as i64) >> unused
}

/// The result of an operation, in the low bits.
pub(super) fn evaluate(compute: Compute, sources: [u64; 4]) -> u64 {
    let [a, b, c, d] = sources;
    let Compute { kind, ty } = compute;
    match kind {
        Kind::Copy => return a,
        Kind::And => return a & b,
        Kind::Or => return a | b,
        Kind::Xor => return a ^ b,
        Kind::Not => return !a,
        Kind::CountOnes => return field(a, 0, ty.bits()).count_ones().into(),
        Kind::Select => return if c & 1 == 1 { a } else { b },
        Kind::Convert(to) => return convert(a, b, ty, to),
        Kind::Permute => return permute(a as u32, b as u32, c as u32).into(),
        Kind::Insert => {
            // `a` into `b` at bit `c`, `d` bits.
            let mask = field(u64::MAX, 0, d as u32 & 0xff) << (c & 0x3f);
            return (b & !mask) | ((a << (c & 0x3f)) & mask);
        }
        Kind::Extract => {
            let taken = field(field(a, 0, ty.bits()), b as u32 & 0xff, c as u32 & 0xff);
            let width = c as u32 & 0xff;
            let extend = matches!(ty, Type::Signed(_)) && (1..64).contains(&width);
            return if extend { signed(taken, width) as u64 } else { taken };
        }
        _ => {}
    }
    match ty {
        Type::Float => {
            let [x, y, z] = [a, b, c].map(|bits| f32::from_bits(bits as u32));
            if let Kind::Compare(compare) = kind {
                return floats_compare(compare, f64::from(x), f64::from(y)).into();
            }
            if let Kind::Unless(compare) = kind {
                let opposite = floats_compare(compare, f64::from(x), f64::from(y));
                return (!opposite).into();
            }
            u64::from(float(kind, x, y, z).to_bits())
        }
        Type::Half => u64::from(half_operation(kind, a as u16, b as u16, c as u16)),
        Type::Halves => {
            let part = |shift: u32| {
                let [x, y, z] = [a, b, c].map(|word| (word >> shift) as u16);
                u64::from(half_operation(kind, x, y, z)) << shift
            };
            part(0) | part(16)
        }
        Type::Signed(bits) => {
            let [x, y, z] = [a, b, c].map(|value| signed(value, bits));
            match kind {
                Kind::ShiftRight => (x >> b.min(u64::from(bits) - 1)) as u64,
                Kind::Compare(compare) => ordered(compare, x.cmp(&y)).into(),
                Kind::Minimum => x.min(y) as u64,
                Kind::Maximum => x.max(y) as u64,
                Kind::Absolute => x.wrapping_abs() as u64,
                Kind::Divide => x.checked_div(y).unwrap_or(-1) as u64,
                Kind::Remainder => x.checked_rem(y).unwrap_or(x) as u64,
                Kind::MultiplyHigh => ((i128::from(x) * i128::from(y)) >> bits) as u64,
                Kind::MultiplyWide => x.wrapping_mul(y) as u64,
                Kind::MultiplyAddWide => (x.wrapping_mul(y) as u64).wrapping_add(c),
                _ => integer(kind, x as u64, y as u64, z as u64, bits),
            }
        }
        Type::Unsigned(bits) | Type::Bits(bits) => {
            let [x, y, z] = [a, b, c].map(|value| field(value, 0, bits));
            match kind {
                Kind::ShiftRight => x.checked_shr(b as u32).unwrap_or(0),
                Kind::Compare(compare) => ordered(compare, x.cmp(&y)).into(),
                Kind::Minimum => x.min(y),
                Kind::Maximum => x.max(y),
                Kind::Divide => x.checked_div(y).unwrap_or(u64::MAX),
                Kind::Remainder => x.checked_rem(y).unwrap_or(x),
                Kind::MultiplyHigh => ((u128::from(x) * u128::from(y)) >> bits) as u64,
                Kind::MultiplyWide => x.wrapping_mul(y),
                Kind::MultiplyAddWide => x.wrapping_mul(y).wrapping_add(c),
                _ => integer(kind, x, y, z, bits),
            }
        }
        // Constants are converted from f64, nothing else.
        Type::Double | Type::Predicate => a,
    }
}

/// Operations whose low bits do not depend on the sign.
fn integer(kind: Kind, a: u64, b: u64, c: u64, bits: u32) -> u64 {
    let result = match kind {
        Kind::ShiftLeft if b >= u64::from(bits) => 0,
        Kind::ShiftLeft => a << b,
        Kind::Add => a.wrapping_add(b),
        Kind::Subtract => a.wrapping_sub(b),
        Kind::Multiply => a.wrapping_mul(b),
        Kind::MultiplyAdd => a.wrapping_mul(b).wrapping_add(c),
        Kind::Negate => a.wrapping_neg(),
        _ => a,
    };
    field(result, 0, bits)
}

fn float(kind: Kind, a: f32, b: f32, c: f32) -> f32 {
    match kind {
        Kind::Add => a + b,
        Kind::Subtract => a - b,
        Kind::Multiply => a * b,
        Kind::MultiplyAdd => a.mul_add(b, c),
        Kind::Divide => a / b,
        Kind::Minimum => a.min(b),
        Kind::Maximum => a.max(b),
        Kind::Negate => -a,
        Kind::Absolute => a.abs(),
        Kind::Exp2 => a.exp2(),
        Kind::Log2 => a.log2(),
        Kind::Reciprocal => 1.0 / a,
        Kind::SquareRoot => a.sqrt(),
        Kind::Tanh => a.tanh(),
        Kind::MultiplyAddDown => {
            let exact = f64::from(a).mul_add(f64::from(b), f64::from(c));
            let nearest = exact as f32;
            if f64::from(nearest) > exact { nearest.next_down() } else { nearest }
        }
        // NaN becomes 0.
        Kind::Saturate if a.is_nan() => 0.0,
        Kind::Saturate => a.clamp(0.0, 1.0),
        _ => f32::NAN,
    }
}

/// In f64 and rounded once: sums and products of halves are exact there.
fn half_operation(kind: Kind, a: u16, b: u16, c: u16) -> u16 {
    let [x, y, z] = [a, b, c].map(|bits| f16::from_bits(bits).to_f64());
    let result = match kind {
        Kind::Add => x + y,
        Kind::Subtract => x - y,
        Kind::Multiply => x * y,
        Kind::MultiplyAdd => x * y + z,
        Kind::Minimum => x.min(y),
        Kind::Maximum => x.max(y),
        Kind::Negate => -x,
        Kind::Absolute => x.abs(),
        _ => f64::NAN,
    };
    f16::from_f64(result).to_bits()
}

fn convert(a: u64, b: u64, from: Type, to: Type) -> u64 {
    if to == Type::Halves {
        // `cvt.rn.f16x2.f32 d, a, b`: `a` is the upper half.
        let half = |bits: u64| u64::from(f16::from_f32(f32::from_bits(bits as u32)).to_bits());
        return half(a) << 16 | half(b);
    }
    let value = match from {
        Type::Half => f16::from_bits(a as u16).to_f64(),
        Type::Float => f64::from(f32::from_bits(a as u32)),
        Type::Double => f64::from_bits(a),
        Type::Signed(bits) => signed(a, bits) as f64,
        _ => field(a, 0, from.bits()) as f64,
    };
    match (from, to) {
        (_, Type::Half) => f16::from_f64(value).to_bits().into(),
        (_, Type::Float) => (value as f32).to_bits().into(),
        (_, Type::Double) => value.to_bits(),
        (Type::Half | Type::Float, Type::Signed(bits)) => field(value as i64 as u64, 0, bits),
        (Type::Half | Type::Float, _) => field(value as u64, 0, to.bits()),
        (Type::Signed(bits), _) => field(signed(a, bits) as u64, 0, to.bits()),
        _ => field(field(a, 0, from.bits()), 0, to.bits()),
    }
}

/// `prmt.b32`: each nibble of `selector` chooses a byte of `b:a`, or its sign.
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |result, i| {
        let choice = selector >> (4 * i);
        let byte = (bytes >> (8 * (choice & 7))) as u8;
        let byte = if choice & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
        result | u32::from(byte) << (8 * i)
    })
}

fn ordered(compare: Compare, order: std::cmp::Ordering) -> bool {
    match compare {
        Compare::Equal => order.is_eq(),
        Compare::Unequal => order.is_ne(),
        Compare::Less => order.is_lt(),
        Compare::LessEqual => order.is_le(),
        Compare::Greater => order.is_gt(),
        Compare::GreaterEqual => order.is_ge(),
    }
}

/// False where either is NaN.
fn floats_compare(compare: Compare, a: f64, b: f64) -> bool {
    a.partial_cmp(&b).is_some_and(|order| ordered(compare, order))
}
