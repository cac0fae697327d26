// Package plan stores solved plans: a directory of files that engines, the request router and people read
// (docs/formats.md).
//
// Invariants:
//   - The same plan is the same bytes. No hashed file holds a time, a path or a machine's name.
//   - The plan digest, the sha256 of manifest.json, names every byte but report.json; the layout digest, the sha256 of
//     placement.json, names what the engine does; the tables name the layout that they are for.
//   - A directory holds a whole plan or none. Read verifies every hash and names the file that is damaged.
//   - A fault of the files is an *InvalidError; every other error is I/O.
package plan
