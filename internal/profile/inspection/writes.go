// SPDX-License-Identifier: Apache-2.0

package inspection

import (
	"encoding/json"
	"time"

	batchv1 "k8s.io/api/batch/v1"

	"github.com/semmoe/operator/internal/kube/jobstate"
	"github.com/semmoe/operator/internal/kube/writes"
)

// Writes returns the writes that record a result, delete obsolete Jobs and start the next attempt, in order, and the
// delay of the next decision. If newJob is nil, no attempt is started.
func (s State) Writes(newJob func(attempt int) *batchv1.Job, now time.Time) (ordered []writes.Write, again time.Duration, err error) {
	attempts := jobstate.Attempts{Unrecorded: s.Unrecorded, NextAttempt: s.NextAttempt, NextAt: s.NextAt, Obsolete: s.Obsolete}
	if s.Unrecorded != nil {
		report, err := json.Marshal(Report{*s.Report, s.Dataset})
		if err != nil {
			return nil, 0, err
		}
		attempts.Report = string(report)
	}
	ordered, again = attempts.Writes(newJob, now)
	return ordered, again, nil
}
