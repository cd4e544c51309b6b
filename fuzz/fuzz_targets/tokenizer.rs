//! A tokenizer file is refused, or gives a tokenizer that works on any text.
#![no_main]

use kivi_models::checkpoint::{GgufVocabulary, TokenizerConfig};
use kivi_models::text::TokenStream;
use kivi_models::tokenizer::Tokenizer;
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // The first byte chooses the kind of file, the text follows up to a zero byte.
    let Some((kind, rest)) = data.split_first() else { return };
    let end = rest.iter().position(|&byte| byte == 0).unwrap_or(0);
    let (text, file) = rest.split_at(end);
    let text = String::from_utf8_lossy(text);
    let tokenizer = if kind % 2 == 0 {
        let file = file.strip_prefix(&[0]).unwrap_or(file);
        Tokenizer::from_json(file, &TokenizerConfig::default())
    } else {
        let Ok(fields) = gguf(&mut Unstructured::new(file)) else { return };
        Tokenizer::from_gguf(fields)
    };
    match tokenizer {
        Ok(tokenizer) => exercise(&tokenizer, &text),
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
});

fn gguf(data: &mut Unstructured<'_>) -> Result<GgufVocabulary> {
    let model = (*data.choose(&["gpt2", "llama"])?).to_owned();
    let pre = (*data.choose(&["smollm", "llama-bpe", "qwen2"])?).to_owned();
    let tokens: Vec<String> = data.arbitrary()?;
    // Mostly the right number and valid types, so that the checks behind are reached.
    let token_types = tokens.iter().map(|_| data.int_in_range(1..=6)).collect::<Result<_>>()?;
    let scores = tokens.iter().map(|_| data.arbitrary()).collect::<Result<_>>()?;
    Ok(GgufVocabulary {
        model,
        pre: Some(pre),
        tokens,
        token_types,
        scores,
        merges: data.arbitrary()?,
        bos_id: data.arbitrary()?,
        eos_id: data.arbitrary()?,
        unk_id: data.arbitrary()?,
        pad_id: data.arbitrary()?,
        add_bos: data.arbitrary()?,
        add_eos: data.arbitrary()?,
        add_space_prefix: data.arbitrary()?,
    })
}

fn exercise(tokenizer: &Tokenizer, text: &str) {
    for parse_special in [false, true] {
        let Ok(ids) = tokenizer.encode(text, true, parse_special) else { continue };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        let mut stream = TokenStream::new(tokenizer, parse_special);
        let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
        streamed += &stream.finish();
        assert_eq!(streamed, tokenizer.decode(&ids, parse_special));
    }
}
