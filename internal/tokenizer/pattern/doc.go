// Package pattern finds the regular expressions by which tokenizer.json files cut text.
//
// Those expressions are written for Oniguruma: they look ahead, nest and intersect classes, and know Unicode's
// properties, so Go's engine cannot take them. Understood are alternation, groups, greedy and possessive quantifiers,
// look-ahead, anchors, classes with nesting and intersection, general categories and scripts, and (?i:...) by simple
// case folding. Anything else is refused by name when the expression is compiled.
//
// Invariants:
//   - The match is the leftmost, and of those the one that backtracking finds first.
//   - No place of the text is tried twice by the same part of an expression, so time grows with the length of the text and
//     not with its square, however long the runs of one character are: texts come from clients. Only a group that is
//     repeated without bound, which no family's expression has, may look at the rest of the text from every place.
//   - A Pattern is immutable; a Matcher belongs to one goroutine.
package pattern
