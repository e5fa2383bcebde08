"""What happens to data between a robot or a data set and a model: functions of dictionaries."""
