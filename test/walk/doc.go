// Package walk takes specs from the schemas of the kinds, valid and invalid, through the real API server and the controllers, on a
// control plane without nodes. What it holds to: an invalid value is refused by the API server, or named by a condition; every field
// that is accepted has an effect; and where a spec leads does not depend on the specs before it.
//
// Fields are read from the generated schemas: a field that is added is tried without being listed anywhere, and fails the tests until
// one of the situations shows its effect.
package walk
