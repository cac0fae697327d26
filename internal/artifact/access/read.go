// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"fmt"
	"io"

	"github.com/semmoe/operator/internal/artifact"
)

// ReadAll returns the verified bytes of an artifact of at most limit bytes.
func (c *Client) ReadAll(ctx context.Context, scope artifact.Scope, digest artifact.Digest, limit int64) ([]byte, error) {
	r, err := c.Get(ctx, scope, digest)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%s/artifacts/%s has more than the maximum of %d bytes", scope, digest, limit)
	}
	return data, nil
}
