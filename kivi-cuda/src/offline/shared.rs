//! Places of shared arrays, which CubeCL 0.10 gives in a random order.

/// A declaration in CUDA C++.
struct Array<'a> {
    /// The line before, which says how many bytes it has.
    size_line: &'a str,
    /// The declaration up to its offset, and what follows.
    head: &'a str,
    tail: &'a str,
    /// Number in its name: the order of the kernel's code.
    number: usize,
    bytes: usize,
    offset: usize,
}

/// Puts the shared arrays of a kernel in the order of the code, 16 bytes aligned; returns the source
/// and the bytes of shared memory.
///
/// CubeCL allocates them in the order of a hash map, another one in every process: equally good
/// places, but other machine code, which no report could be compared with. Arrays that share a
/// place, because one was freed, are left where they are.
pub(super) fn settle(source: String, bytes: usize) -> (String, usize) {
    match sorted(&source) {
        Some(settled) => settled,
        None => (source, bytes),
    }
}

fn sorted(source: &str) -> Option<(String, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let mut arrays = Vec::new();
    let mut first = None;
    for (index, pair) in lines.windows(2).enumerate() {
        if let Some(array) = parse(pair[0], pair[1]) {
            first.get_or_insert(index);
            arrays.push(array);
        }
    }
    let first = first?;
    // Together, in one place of the source, and nowhere overlapping.
    let after = first + 2 * arrays.len();
    arrays.sort_by_key(|array| array.offset);
    if arrays.windows(2).any(|pair| pair[0].offset + pair[0].bytes > pair[1].offset)
        || lines.iter().filter(|line| line.contains("&dynamic_shared_mem[")).count() != arrays.len()
        || !lines.get(first..after)?.iter().step_by(2).all(|line| line.starts_with(SIZE))
    {
        return None;
    }
    arrays.sort_by_key(|array| array.number);
    let mut end = 0_usize;
    let mut settled: Vec<String> = lines[..first].iter().map(|&line| line.to_owned()).collect();
    for Array { size_line, head, tail, bytes, .. } in &arrays {
        let offset = end.next_multiple_of(16);
        settled.push((*size_line).to_owned());
        settled.push(format!("{head}{MEMORY}{offset}{tail}"));
        end = offset + bytes;
    }
    settled.extend(lines[after..].iter().map(|&line| line.to_owned()));
    Some((settled.join("\n") + "\n", end))
}

const SIZE: &str = "// Shared array size: ";
const MEMORY: &str = "&dynamic_shared_mem[";

/// `// Shared array size: 8, 32 bytes` and
/// `float *shared_memory_16 = reinterpret_cast<float*>(&dynamic_shared_mem[34352]);`
fn parse<'a>(size_line: &'a str, line: &'a str) -> Option<Array<'a>> {
    let (_, bytes) = size_line.strip_prefix(SIZE)?.split_once(", ")?;
    let bytes = bytes.strip_suffix(" bytes")?.parse().ok()?;
    let (_, name) = line.split_once(" *shared_memory_")?;
    let (number, _) = name.split_once(' ')?;
    let (head, place) = line.split_once(MEMORY)?;
    let end = place.find(']')?;
    let offset = place[..end].parse().ok()?;
    Some(Array {
        size_line,
        head,
        tail: &place[end..],
        number: number.parse().ok()?,
        bytes,
        offset,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(arrays: &[(usize, usize, usize)]) -> String {
        let array = |&(number, bytes, offset): &(usize, usize, usize)| {
            format!(
                "{SIZE}{}, {bytes} bytes\n\
                 float *shared_memory_{number} = reinterpret_cast<float*>({MEMORY}{offset}]);\n",
                bytes / 4
            )
        };
        let arrays: String = arrays.iter().map(array).collect();
        format!("void kernel() {{\n{arrays}x = 1;\n}}\n")
    }

    #[test]
    fn any_order_settles_in_the_same_places() {
        let one = source(&[(7, 20, 0), (3, 64, 32), (12, 8, 96)]);
        let other = source(&[(3, 64, 0), (12, 8, 64), (7, 20, 80)]);
        let settled = source(&[(3, 64, 0), (7, 20, 64), (12, 8, 96)]);
        assert_eq!(settle(one, 104), (settled.clone(), 104));
        assert_eq!(settle(other, 100), (settled, 104));
    }

    #[test]
    fn shared_places_are_left() {
        let overlapping = source(&[(3, 64, 0), (7, 64, 32)]);
        assert_eq!(settle(overlapping.clone(), 96), (overlapping, 96));
        let none = "void kernel() {}\n".to_owned();
        assert_eq!(settle(none.clone(), 0), (none, 0));
    }
}
