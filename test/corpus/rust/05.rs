#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Token>, ParseError> {
        Lexer::new(text).collect()
    }

    #[test]
    fn numbers_and_operators() {
        let tokens = parse("1 + 23*(4-5)").unwrap();
        assert_eq!(tokens.len(), 9);
        assert_eq!(tokens[0], Token::Number(1));
        assert_eq!(tokens[2], Token::Number(23));
        assert_eq!(tokens[3], Token::Star);
    }

    #[test]
    fn white_space_does_not_matter() {
        assert_eq!(parse("a=b"), parse("  a =\n\tb "));
    }

    #[test]
    fn unknown_characters_are_refused() {
        let error = parse("x # y").unwrap_err();
        assert_eq!(error.position, 2);
        assert!(error.to_string().contains("'#'"), "{error}");
    }

    #[test]
    #[should_panic(expected = "overflow")]
    fn numbers_do_not_wrap_around() {
        let _ = parse("99999999999999999999999").unwrap();
    }
}
