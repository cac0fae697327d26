// SPDX-License-Identifier: Apache-2.0

// Package specfields generates valid and invalid specs from the schemas of the kinds, and applies them to a real API server
// with the controllers, on a control plane without nodes. It checks three properties:
//   - The API server refuses an invalid value, or a condition names its field.
//   - Every accepted field has an effect.
//   - The final state of a spec does not depend on earlier specs of the object.
//
// The fields are read from the generated schemas. A new field is therefore tested without being listed, and fails the
// tests until one of the situations shows its effect.
package specfields
