// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// OverlapField is the field of the spec that sets Launch.Overlap.
const OverlapField = "spec.engine.overlap"

// OverlapThresholds are numbers of tokens of a rank from which an engine splits a step that only decodes, or one with
// prompts.
type OverlapThresholds struct{ Decode, Prefill int32 }

// ValidateOverlap returns an error that names the field if the engine does not support Launch.Overlap. Without a family,
// properties of the model are not checked.
func (a Adapter) ValidateOverlap(s Situation) error {
	switch {
	case s.Launch.Overlap == semmoev1.OverlapSpec{}:
		return nil
	case a.CheckOverlap == nil:
		return fmt.Errorf("%s: %s has no flag for it: remove the field", OverlapField, a.Type)
	}
	return a.CheckOverlap(s)
}

// RefuseOverlap returns the error for a member of Launch.Overlap for which an engine has no flag. instead describes an
// alternative; it may be empty.
func RefuseOverlap(engine, member, instead string) error {
	return fmt.Errorf("%s.%s: %s has no flag for it%s: remove the field", OverlapField, member, engine, instead)
}
