package engine

import (
	"fmt"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// OverlapField is the field of the spec that Launch.Overlap stands in.
const OverlapField = "spec.engine.overlap"

// Overlaps tells why the engine cannot do what Launch.Overlap asks for, and names the field; nil where it can, or nothing is asked for.
// Without a family the model is not looked at.
func (a Adapter) Overlaps(s Situation) error {
	switch {
	case s.Launch.Overlap == semmoev1.OverlapSpec{}:
		return nil
	case a.CheckOverlap == nil:
		return fmt.Errorf("%s: %s has no flag for it: remove the field", OverlapField, a.Type)
	}
	return a.CheckOverlap(s)
}

// RefuseOverlap is the error of a member of Launch.Overlap that an engine has no flag for; instead says what it has, and may be empty.
func RefuseOverlap(engine, member, instead string) error {
	return fmt.Errorf("%s.%s: %s has no flag for it%s: remove the field", OverlapField, member, engine, instead)
}
