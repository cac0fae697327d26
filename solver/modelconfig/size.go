// SPDX-License-Identifier: Apache-2.0

package modelconfig

import (
	"bytes"
	"encoding/json"
	"reflect"
)

// Size is a number of a configuration, or the first number of a list: Hunyuan has one for each layer, ERNIE's vision
// models list the text size before the image size.
type Size int

// UnmarshalJSON returns an error for other types and for an empty list.
func (s *Size) UnmarshalJSON(text []byte) error {
	if !bytes.HasPrefix(text, []byte("[")) {
		return json.Unmarshal(text, (*int)(s))
	}
	var list []int
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	if len(list) == 0 {
		return &json.UnmarshalTypeError{Value: "empty list", Type: reflect.TypeFor[Size]()} // encoding/json adds the field
	}
	*s = Size(list[0])
	return nil
}
