//! Chat templates against transformers' own Jinja environment; the golden file is made by
//! `tools/golden_tokenizer.py`.

use kivi_models::Error;
use kivi_models::chat::{ChatTemplate, Message};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    templates: Vec<Template>,
}

#[derive(Deserialize)]
struct Template {
    name: String,
    source: String,
    rendered: Vec<Rendered>,
}

#[derive(Deserialize)]
struct Rendered {
    messages: Vec<Message>,
    add_generation_prompt: bool,
    text: Option<String>,
    error: Option<String>,
}

#[test]
fn templates_render_as_in_transformers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/chat.json");
    let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(golden.templates.len() >= 6);
    for Template { name, source, rendered } in golden.templates {
        let template = ChatTemplate::new(&source, "<s>", "</s>").unwrap();
        for case in rendered {
            let found = template.render(&case.messages, case.add_generation_prompt);
            let context = format!("{name}: {:?}", case.messages);
            match (case.text, case.error) {
                (Some(expected), _) => assert_eq!(found.unwrap(), expected, "{context}"),
                (None, Some(expected)) => match found.unwrap_err() {
                    Error::TemplateRejected { reason } => {
                        assert_eq!(reason, expected, "{context}");
                    }
                    other => panic!("{context}: {other}"),
                },
                (None, None) => panic!("{context}: neither text nor error"),
            }
        }
    }
}

#[test]
fn a_broken_template_is_an_error_with_its_line() {
    let error = ChatTemplate::new("a\n{% if %}", "", "").unwrap_err().to_string();
    assert!(error.starts_with("invalid chat template: ") && error.contains(":2"), "{error}");
    assert!(!error.contains('\n'));
}

#[test]
fn a_failing_or_endless_template_is_an_error() {
    let render = |source| ChatTemplate::new(source, "", "").unwrap().render(&[], true);
    for source in [
        "{{ missing.field }}",
        "{{ 'x' + 1 }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{{ i }}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 | tojson(sort_keys=true) }}",
    ] {
        let error = render(source).unwrap_err();
        assert!(matches!(error, Error::InvalidTemplate { .. }), "{source}: {error}");
    }
}

#[test]
fn the_date_is_today() {
    let template = ChatTemplate::new("{{ strftime_now('%d %b %Y|%%|%Y') }}", "", "").unwrap();
    let text = template.render(&[], false).unwrap();
    let parts: Vec<&str> = text.split('|').collect();
    assert_eq!((parts.len(), parts[1]), (3, "%"));
    assert!(parts[0].ends_with(parts[2]) && parts[2].parse::<u32>().unwrap() >= 2025, "{text}");
}
