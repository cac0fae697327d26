// Package corpus is text of many kinds for demonstrations and measurements: documents that were written for it, in
// program languages, data formats and human languages, and text that every machine with Go has.
//
// Invariants: the same release of Go and the same seed give the same documents and requests everywhere. Every kind is
// split by itself, by whole documents, so that what is held out is of the same kinds as the rest, and none of it is seen
// in the rest.
package corpus
